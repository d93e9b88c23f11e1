"""User functions that run in a thread: the source of prompts, the hooks of a step, and the log functions."""
