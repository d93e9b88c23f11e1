"""The simulated system: engines, trainer and workload around the real scheduler."""
