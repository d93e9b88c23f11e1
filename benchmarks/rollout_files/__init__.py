"""The cost of the files with a run's samples, for the event loop and in CPU time."""
