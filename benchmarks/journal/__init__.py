"""The cost of the journal, for the disk, the event loop and the CPU."""
