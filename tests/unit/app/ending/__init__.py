"""The end of a program whose orderly end does not come."""
