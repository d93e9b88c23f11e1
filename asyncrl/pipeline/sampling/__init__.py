"""One sample, from its slot to its reward."""
