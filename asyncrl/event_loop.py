"""The event loop's clock, and whether the running task was cancelled."""

import asyncio


def loop_time() -> float:
    """Return the loop's clock in seconds: monotonic in a run, virtual in a simulation."""
    return asyncio.get_running_loop().time()


def is_cancelled() -> bool:
    """Return whether the running task itself was cancelled, not only something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
