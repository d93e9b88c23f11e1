"""The samples of a run, as files."""
