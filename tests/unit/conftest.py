"""What every unit test may take for granted."""

import gc


def pytest_collection_finish() -> None:
    """What the imports made (300,000 objects with torch) is not looked through again at every full collection."""
    gc.collect()
    gc.freeze()
