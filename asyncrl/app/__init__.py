"""The program: from the command line to an exit code."""
