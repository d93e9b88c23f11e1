"""A run whose trainer dies or hangs."""
