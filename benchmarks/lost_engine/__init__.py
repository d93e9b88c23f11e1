"""A run whose engine dies or hangs."""
