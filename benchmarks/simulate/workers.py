"""The worker processes of the simulator.

Their functions are outside of ``__main__``, which a spawned process does not import.
"""

import logging
import multiprocessing
import os
from concurrent.futures import Executor, ProcessPoolExecutor

from asyncrl.app.gc_tuning import freeze_startup_objects


def pool_of(processes: int | None) -> Executor:
    """A pool of worker processes, one per core unless ``processes`` says how many."""
    return ProcessPoolExecutor(
        processes or os.cpu_count(), mp_context=multiprocessing.get_context("spawn"), initializer=_begin
    )


def _begin() -> None:
    """Prepare a worker.  Simulated engines fail by design, so a warning for each would only be noise."""
    logging.disable(logging.WARNING)
    freeze_startup_objects()
