"""The search: compares policies, splits and settings on the simulator, and advises."""
