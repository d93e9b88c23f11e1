"""Checkpoints: torch_dist files, Hugging Face files, and the folders that hold them."""
