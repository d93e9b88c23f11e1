"""Learning curves of several runs, in arms that differ in one setting."""
