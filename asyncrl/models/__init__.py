"""Model shapes, read from ``config.json``.  Imports neither torch nor Megatron."""
