"""Trained tokens per second: synchronous against asynchronous runs on the same GPUs."""
