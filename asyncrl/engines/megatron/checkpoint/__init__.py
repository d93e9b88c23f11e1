"""Checkpoints: torch_dist and Hugging Face files, and the folders that hold them."""
