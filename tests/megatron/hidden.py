"""What a process of its own calls before anything is imported; so this imports nothing."""

import sys


def hide_te() -> None:
    """TransformerEngine cannot be imported here from now on."""
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
