"""Tools for episodes: running them in a loop, parsing calls, a sandbox for code, and search over a local index."""
