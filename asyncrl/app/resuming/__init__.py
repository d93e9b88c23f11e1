"""The start of a run: new, resumed from a checkpoint, or recovered after a kill."""
