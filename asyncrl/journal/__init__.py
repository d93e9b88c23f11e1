"""The command ``asyncrl journal``: what the journal of a run has."""
