"""The initializer of separate processes, called before any other import; so this imports nothing else."""

import sys


def hide_te() -> None:
    """TransformerEngine cannot be imported here from now on."""
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
