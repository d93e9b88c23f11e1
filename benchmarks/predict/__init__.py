"""Compares the simulator's predictions with measured runs."""
