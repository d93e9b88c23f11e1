"""Deterministic lives of a run in which everything outside may fail: one seed, one life."""
