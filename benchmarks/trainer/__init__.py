"""Speed and memory of one training step."""
