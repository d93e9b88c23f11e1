"""Reads the timeline of a run and sums it up over time."""
