"""Predictions of the simulator, compared with measured runs."""
