"""Runs that a Python program or a notebook drives: docs/python.md."""
