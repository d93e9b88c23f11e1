"""Traces of slime, which are not recorded."""
