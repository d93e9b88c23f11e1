"""The simulator's command line."""
