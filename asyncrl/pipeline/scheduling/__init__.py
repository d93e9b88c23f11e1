"""Groups: which may start, which are trained next, and where each of their tokens went."""
