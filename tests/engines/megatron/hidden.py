"""The initializer of separate processes: it is called before any other import, so this module imports nothing else."""

import sys


def hide_te() -> None:
    """Make every later import of TransformerEngine fail."""
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
