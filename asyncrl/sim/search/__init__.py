"""The simulator's questions: compares policies, splits and settings, and advises."""
