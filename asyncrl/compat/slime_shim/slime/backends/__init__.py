"""The names of slime's training backends."""
