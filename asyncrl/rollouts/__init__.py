"""Generation by user functions: the token record of an episode, its limits, and the ways in."""
