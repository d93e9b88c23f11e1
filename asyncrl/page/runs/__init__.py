"""The files of a run that the page reads: rows of metrics, settings, and whether the run has ended."""
