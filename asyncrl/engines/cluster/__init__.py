"""Ray actors for engines, router and trainer ranks, one per process, and their supervision."""
