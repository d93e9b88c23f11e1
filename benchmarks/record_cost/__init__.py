"""The cost of a run's records in trained tokens per second."""
