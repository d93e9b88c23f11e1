"""Faults that are planted in short runs, to see whether each raises its alarm."""
