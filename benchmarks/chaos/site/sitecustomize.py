"""Python runs this file at the start of every process that has its folder in PYTHONPATH."""

import os
import random

from benchmarks.chaos.holds import watch_renames

if "ASYNCRL_CHAOS_PORTS" in os.environ:  # all runs try the same ports in the same order
    random.seed(0)
watch_renames()
