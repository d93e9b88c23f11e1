"""Generation, rewards and filters of slime, one sample at a time."""
