"""Calibration of the simulated system on a real run, and replay of one."""
