"""The name of a prompt's data source."""

from typing import Any

__all__ = ["get_source"]


def get_source(sample: Any) -> str:
    """Return the source that the sample's metadata names, or ``unknown``."""
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    return str(getattr(sample, "source", None) or metadata.get("source_name") or "unknown")
