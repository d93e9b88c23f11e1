"""The command ``asyncrl`` and its completion in shells."""
