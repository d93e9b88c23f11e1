"""The routes that the trainer's routers choose themselves, as if an engine had chosen them.

Replay then changes no computation, so the seconds that it adds are its cost.  With random routes the experts' loads
would change as well, and with them the speed of their products.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.megatron.model.packing import Microbatch
from asyncrl.engines.megatron.model.routing import RoutingReplay, _Replay
from asyncrl.token_columns import Routes
from asyncrl.types import Batch


def with_own_routes(trainer: Any, batch: Batch) -> Batch:
    """Train on the batch, and return it with the experts that the trainer's routers chose for it.  For one rank."""
    with _recorded() as passed:
        trainer.train(batch)
    experts: dict[int, NDArray[Any]] = {}
    for row, chosen in passed:
        experts_TLK = torch.stack(chosen, 1).cpu().numpy()
        for index, first, total in zip(row.indices, row.edges, row.totals, strict=False):
            experts[index] = experts_TLK[first : first + total - 1].copy()
    return _with_routes(batch, experts)


@contextmanager
def _recorded() -> Iterator[list[tuple[Microbatch, list[Tensor]]]]:
    """Record the microbatches that pass, and the choices of each router for them, layer by layer."""
    passed: list[tuple[Microbatch, list[Tensor]]] = []
    row_routes, choose = RoutingReplay.row_routes, _Replay.get_replay_topk

    def noted(self: Any, row: Microbatch, *others: Any) -> Any:
        passed.append((row, []))
        return row_routes(self, row, *others)

    def chosen(self: Any, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        scores_TK, experts_TK = choose(self, *given, **named)
        passed[-1][1].append(experts_TK.to(torch.int16))
        return scores_TK, experts_TK

    with patch.object(RoutingReplay, "row_routes", noted), patch.object(_Replay, "get_replay_topk", chosen):
        yield passed


def _with_routes(batch: Batch, experts: dict[int, NDArray[Any]]) -> Batch:
    places = iter(range(len(experts)))
    dtype = np.uint8 if max(int(each.max()) for each in experts.values()) < 2**8 else np.uint16
    groups = [
        replace(
            group,
            samples=tuple(
                replace(
                    each, sample=replace(each.sample, routes=Routes(experts_NLK=experts[next(places)].astype(dtype)))
                )
                for each in group.samples
            ),
        )
        for group in batch.groups
    ]
    return replace(batch, groups=tuple(groups))
