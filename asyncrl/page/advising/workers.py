"""The worker processes of a study.

Their functions are outside of ``__main__``, which a spawned process does not import.
"""

import logging
import multiprocessing
from concurrent.futures import Executor, ProcessPoolExecutor


def pool_of(processes: int) -> Executor:
    """Return a pool of worker processes.  Its processes end with the group of the process that made it."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_begin)


def _begin() -> None:
    """Prepare a worker: warnings of simulated engines would only be noise."""
    logging.disable(logging.WARNING)
