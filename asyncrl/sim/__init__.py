"""The simulator: modelled engines around the real scheduler on a virtual clock, to compare settings without GPUs."""
