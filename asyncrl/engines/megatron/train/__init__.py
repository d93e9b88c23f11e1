"""One training step: forward and backward passes, losses, optimizer updates and reports."""
