"""A rank's process: its settings, its groups, its optimizer, and stand-ins for CUDA on a CPU."""
