"""A stage that blocks the event loop fails its test."""

from collections.abc import Iterator

import pytest
from blockbuster import blockbuster_ctx


@pytest.fixture(autouse=True, scope="module")
def _nothing_blocks() -> Iterator[None]:
    with blockbuster_ctx():
        yield
