"""Calibrates the simulator on a run and asks it about other settings, in a separate process."""
