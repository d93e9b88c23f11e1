"""Benchmarks, one package each; start one with ``python -m benchmarks.NAME``."""
