"""Runs of the quickstart with one fault each, and what became of them."""
