"""Errors of a rank, as its actor passes them on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.engines.cluster.actors import RankActor
from asyncrl.errors import TrainerOutOfMemory


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTried 2 GiB"),
            TrainerOutOfMemory,
            "^train: CUDA out of memory.$",
        ),
        (RuntimeError("shapes differ"), RuntimeError, "^shapes differ$"),
    ],
)
def test_a_shortage_of_memory_gets_a_name_that_needs_no_torch(error: Exception, kind: type, text: str) -> None:
    def train(batch: int) -> Any:
        raise error

    actor = RankActor()
    actor._rank = SimpleNamespace(train=train)  # type: ignore[assignment]  # noqa: SLF001
    with pytest.raises(kind, match=text) as raised:
        actor.call("train", 0)
    assert type(raised.value) is kind


def test_a_rank_that_starts_says_so_to_calls_of_another_thread() -> None:
    with pytest.raises(RuntimeError, match="the rank has not started yet"):
        RankActor().call("abandon", "asyncrl-1")
