"""Runs of the quickstarts that are killed again and again, and the checks of what they kept."""
