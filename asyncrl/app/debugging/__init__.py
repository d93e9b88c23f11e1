"""Runs for debugging, of one part of the product alone."""
