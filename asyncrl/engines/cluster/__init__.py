"""Where engines, router and trainer ranks run: Ray actors, one per process."""
