"""Settings of Python's garbage collector that keep it from stopping the event loop."""

import gc


def freeze_startup_objects() -> None:
    """Freeze all objects loaded so far, and collect cyclic garbage less often.

    A full collection with 1,000 answers in flight stopped the event loop for 240 to 560 ms and freed nothing, because
    the values in flight have no cycles.  With these thresholds most runs of ``benchmarks.controller`` have no full
    collection.
    """
    # Invariant: call before any sample is in flight.  Frozen objects are never collected, even as garbage in a cycle.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
