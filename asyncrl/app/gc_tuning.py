"""Python's garbage collector, kept from stopping the event loop."""

import gc


def freeze_startup_objects() -> None:
    """Look for cycles less often, and never again among what was loaded so far.

    A full collection with 1,000 answers in flight stopped the event loop for 240 to 560 ms and found nothing: what
    flows has no cycles.  With these thresholds there was none in most runs of ``benchmarks/controller.py``.
    """
    # Invariant: call before anything flows.  What is frozen is never collected, even as garbage in a cycle.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
