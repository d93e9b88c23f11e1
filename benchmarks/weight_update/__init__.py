"""Pause and duration of weight updates."""
