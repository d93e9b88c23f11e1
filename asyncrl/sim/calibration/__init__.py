"""Fits the simulated system to a real run, and replays one."""
