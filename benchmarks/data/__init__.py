"""Streams of prompts: the time to the first batch, and the memory of the controller."""
