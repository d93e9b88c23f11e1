"""The pipeline: admission, staleness, weight updates and evaluation.  Pure asyncio, without torch, HTTP or Ray."""
