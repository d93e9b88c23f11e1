"""Model shapes, hardware and processes that several benchmarks share."""
