"""slime's set-up of logging, which asyncrl does itself."""

from typing import Any

__all__ = ["configure_logger"]


def configure_logger(*args: Any, **kwargs: Any) -> None:
    """Do nothing: the process of user code has its logging."""
