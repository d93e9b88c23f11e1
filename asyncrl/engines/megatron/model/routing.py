"""Routing replay: the policy's routers take the experts that the engine took.

Engine and trainer round differently.  Where two experts score alike, rounding decides, and the log-prob of a token with
another expert may be off by several nats.  With replay the router still computes the weights of the experts, and so
gets their gradients, but does not choose them.

    Microbatch.routes ──▶ RowRoutes in PackedRow ──▶ hook of a transformer layer ──▶ object at router.router_replay

Only routers of the model that ``RoutingReplay`` was constructed with replay.  A critic's never do, and the reference
model's, which is the policy's with other weights, gets rows without routes.

Shape letters: T tokens of a rank's part of a microbatch, R response tokens of all its samples, L mixture layers of its
pipeline stage, K experts per token, E experts.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.megatron.model.packing import Example, Microbatch
from asyncrl.engines.megatron.setup.transfer import on_device
from asyncrl.errors import ConfigError, TrainerFailed
from asyncrl.internals import Internal
from asyncrl.token_columns import POSITIONS

INTERNALS = (
    Internal(
        name="megatron.core.transformer.moe.router.TopKRouter.routing", attributes=("router_replay",), used_in=__name__
    ),
    Internal(
        name="megatron.core.transformer.moe.router_replay.RouterReplay.get_replay_topk",
        parameters=("self", "scores", "topk", "num_groups", "group_topk", "default_compute_topk"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.transformer.moe.moe_utils.topk_routing_with_score_function",
        parameters=("logits", "topk"),
        keywords=("router_replay",),
        attributes=("get_replay_topk",),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.transformer.transformer_block.TransformerBlock.forward",
        attributes=("packed_seq_params",),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""

_COMPARED = 2**24
"""Pairs of experts that are compared at once, at most."""
_IGNORE_ROUTES = ("sinkhorn", "quantile_balancing")
"""Megatron's kinds of load balancing that choose the experts themselves."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowRoutes:
    """The routes of a rank's own tokens, on its device."""

    experts_TLK: Tensor
    """uint8 or uint16.  Each layer widens its own part: all layers of 32,768 tokens of Qwen3-30B-A3B take 12.6 MB,
    and would take 101 MB in int64."""
    is_known_T: Tensor
    """False where a router chooses for itself: at missing rows, and at padding."""
    are_all_known: bool
    own: "OwnChoices | None" = None
    """The choices of the routers; None: not compared."""


class OwnChoices:
    """The routers' own choices for the tokens of one microbatch, compared with the engine's once all routers have run.

    Each router writes its own part.  One comparison of all layers takes a tenth of the launches of one in each layer.
    """

    def __init__(self, experts_TLK: Tensor, is_known_T: Tensor) -> None:
        """``experts_TLK`` are the engine's choices."""
        if experts_TLK.dtype == torch.uint16:  # which torch does not compare
            experts_TLK = experts_TLK.view(torch.int16)
        self._experts_TLK, self._is_known_T = experts_TLK, is_known_T
        self._own_TLK: Tensor | None = torch.empty_like(experts_TLK)
        self._num_left = experts_TLK.shape[1]
        self._differing_T: Tensor | None = None

    def note(self, layer: int, own_TK: Tensor) -> None:
        """Take the choices of one router.  Every router calls it once."""
        assert self._own_TLK is not None, "each router runs once with gradients"
        self._own_TLK[:, layer] = own_TK
        self._num_left -= 1
        if self._num_left == 0:
            self._differing_T = _differing(self._experts_TLK, self._own_TLK, self._is_known_T)
            self._own_TLK = None

    @property
    def differing_T(self) -> Tensor:
        """Number of engine's choices that the routers would not have made, int32, summed over layers."""
        assert self._differing_T is not None, "every router has run"
        return self._differing_T


class RoutingReplay:
    """The replay in the policy's routers on this rank; a dense model has none."""

    def __init__(self, model: Any) -> None:
        """Take over the routers' choice.  Raises ConfigError if their kind ignores it."""
        check_replayable(model.config)
        layers = [layer for layer in model.decoder.layers if getattr(layer.mlp, "router", None) is not None]
        first = layers[0].layer_number - 1 if layers else 0  # counted over all pipeline stages, from 1
        frequencies = model.config.moe_layer_freq if model.config.num_moe_experts else []
        before = sum(frequencies[:first])
        self._layers = slice(before, before + len(layers))
        self._num_layers, self._num_chosen = sum(frequencies), model.config.moe_router_topk
        self._routers = [_Replay(number) for number in range(len(layers))]
        self._counted: list[_Counted] = []
        self._read: list[tuple[_Counted, NDArray[np.int32]]] = []
        """Microbatches whose counts are on the host."""
        for layer, replay in zip(layers, self._routers, strict=True):
            layer.mlp.router.router_replay = replay
            layer.register_forward_pre_hook(partial(_hand_over, replay), with_kwargs=True)

    def begin(self, examples: Sequence[Example]) -> None:
        """Begin a step on these samples of all ranks.  Raises TrainerFailed if a sample's routes do not fit the model.

        Forgets what a failed step may have left.
        """
        self._read = []
        for example in examples:
            shape = None if example.routes is None else example.routes.experts_NLK.shape[1:]
            if shape not in (None, (self._num_layers, self._num_chosen)):
                raise TrainerFailed(
                    f"sample {example.index} has routes of {shape[0]} layers with {shape[1]} experts per token; the "
                    f"trainer's model has {self._num_layers} mixture layers with {self._num_chosen}"
                )
        self._counted = []
        for replay in self._routers:
            replay.forget()

    def rewinding(self) -> Callable[[], None]:
        """Return a function that forgets the microbatches from now on, because their pass will be repeated."""
        num_counted = len(self._counted)

        def rewind() -> None:
            del self._counted[num_counted:]
            for replay in self._routers:
                replay.forget()

        return rewind

    def row_routes(self, row: Microbatch, places_T: NDArray[np.int64], device: torch.device) -> RowRoutes | None:
        """Return the routes of the tokens that this rank's routers see; None if there are none.

        ``places_T`` are the tokens of its context-parallel rank.  Tensor-parallel ranks share them in order.  Routes
        that differ are counted if gradients are enabled.

        Call it before the microbatch's other work on the device: it keeps the host busy for about a millisecond.
        """
        if row.routes is None or not self._routers:
            return None
        sharing = parallel_state.get_tensor_model_parallel_group()
        mine_T = places_T.reshape(sharing.size(), -1)[sharing.rank()]
        given_TLK, given_T = _gathered(row, mine_T, self._layers)
        experts_TLK, is_known_T = on_device(given_TLK, device), on_device(given_T, device)
        own = OwnChoices(experts_TLK, is_known_T) if torch.is_grad_enabled() else None
        if own is not None:
            self._counted.append(_Counted(row=row, places_T=mine_T, is_known_T=given_T, own=own))
        return RowRoutes(experts_TLK=experts_TLK, is_known_T=is_known_T, are_all_known=bool(given_T.all()), own=own)

    def read_counts(self) -> None:
        """Copy the counts of the passes so far to the host, which waits for these passes.

        Call it before the optimizer's work, for which the host would wait as well.
        """
        counted, self._counted = self._counted, []
        if counted:
            every = torch.cat([each.own.differing_T for each in counted]).cpu().numpy()
            edges = np.cumsum([len(each.places_T) for each in counted])
            self._read += zip(counted, np.split(every, edges[:-1]), strict=True)

    def metrics(self, examples: Sequence[Example]) -> dict[str, float]:
        """Return the metrics of a step on these samples of all ranks; none if no sample has routes.  Collective.

        They are of the passes before the last ``read_counts``.  The host does not wait for the GPU.
        """
        given = [example for example in examples if example.routes is not None]
        if not given:
            return {}
        names = _classes(given)
        sums = torch.tensor(self._sums(names, examples), dtype=torch.int64)
        dist.all_reduce(sums)  # on the host; every rank has other tokens, or other layers
        differing, *by_class = sums.tolist()
        num_known = sum(len(each.routes) - each.routes.num_missing for each in given if each.routes is not None)
        told = {"train/routes_missing": 1 - num_known / sum(example.num_inputs for example in examples)}
        if num_known:
            told["train/routes_differ"] = differing / (num_known * self._num_layers * self._num_chosen)
        shares = zip(names, by_class[: len(names)], by_class[len(names) :], strict=True)
        return told | {f"routes_differ/{name}": part / total for name, part, total in shares if total}

    def _sums(self, names: Sequence[str], examples: Sequence[Example]) -> list[int]:
        """Return this rank's number of differing experts, that of each class, and all replayed experts of each class.

        Forgets the counts.
        """
        read, self._read = self._read, []
        differing, total, replayed = 0, Counter[str](), Counter[str]()
        by_index = {example.index: example for example in examples}
        for each, differing_T in read:
            differing += int(differing_T.sum())
            total.update(each.by_class(differing_T, by_index))
            replayed.update(each.by_class(each.is_known_T, by_index))
        num_each = len(self._routers) * self._num_chosen
        return [differing, *(total[name] for name in names), *(num_each * replayed[name] for name in names)]


def check_replayable(config: TransformerConfig) -> None:
    """Raise ConfigError if routers of this configuration would ignore routes without an error."""
    balancing = config.moe_router_load_balancing_type
    kinds = [balancing] if isinstance(balancing, str) else balancing
    found = [f"moe_router_load_balancing_type {kind}" for kind in kinds if kind in _IGNORE_ROUTES]
    if config.moe_router_fusion:
        found.append("moe_router_fusion")
    if config.num_moe_experts and found:
        raise ConfigError(
            f"routing replay: Megatron's router ignores routes with {' and '.join(found)}; leave it unset"
        )


def _hand_over(replay: "_Replay", layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    replay.take(kwargs["packed_seq_params"].routes)


class _Replay:
    """The object that one router asks for its choice, in place of Megatron's ``RouterReplay``.

    The layer is called before its router, also when the backward pass recomputes the layer.  If the backward pass
    recomputes its mixture only (``recompute_modules`` moe), other microbatches may have passed meanwhile.  Invariant:
    the router runs exactly once with gradients enabled for each call of the layer with gradients enabled, and in the
    same order, because a pipeline's backward passes have the order of its forward passes.
    """

    def __init__(self, layer: int) -> None:
        """``layer`` counts the mixture layers of the pipeline stage."""
        self._layer = layer
        self.forget()

    def forget(self) -> None:
        """Drop the routes of earlier microbatches."""
        self._present: RowRoutes | None = None
        self._waiting: deque[RowRoutes | None] = deque()

    def take(self, routes: RowRoutes | None) -> None:
        """Take the routes of the microbatch that the layer is called with."""
        self._present = routes
        if torch.is_grad_enabled():
            self._waiting.append(routes)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of the chosen experts, T x K, and their ids."""
        assert default_compute_topk is not None, "Megatron passes its own choice"
        # A checkpoint's first pass has no gradients.
        routes = self._waiting.popleft() if torch.is_grad_enabled() else self._present
        if routes is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        experts_TK = routes.experts_TLK[:, self._layer].long()
        own = routes.own if torch.is_grad_enabled() else None
        if own is not None or not routes.are_all_known:
            _, own_TK = default_compute_topk(scores.detach(), topk, num_groups, group_topk)
            if own is not None:
                own.note(self._layer, own_TK)
            if not routes.are_all_known:
                experts_TK = torch.where(routes.is_known_T.unsqueeze(1), experts_TK, own_TK)
        return scores.gather(1, experts_TK), experts_TK


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Counted:
    """The tokens of a rank's part of one microbatch, whose differing experts are counted."""

    row: Microbatch
    places_T: NDArray[np.int64]
    is_known_T: NDArray[np.bool_]
    own: OwnChoices

    def by_class(self, values_T: NDArray[Any], by_index: Mapping[int, Example]) -> Counter[str]:
        """Sum the values of trained tokens by class.  The value of a token is that of the position predicting it."""
        whole = np.zeros(len(self.row.token_ids_T), np.int64)
        whole[self.places_T] = values_T
        totals_R = [0, *np.where(self.row.mask_R, whole[self.row.sources_R], 0).cumsum().tolist()]
        sums, first = Counter[str](), 0
        for index, length in zip(self.row.indices, self.row.lengths, strict=True):
            add_by_class(sums, totals_R[first : first + length + 1], by_index[index].lags)
            first += length
        return sums


def add_by_class(sums: Counter[str], totals_R: Sequence[int], lags: Sequence[tuple[int, int, int]]) -> None:
    """Add the values of one sample's R response tokens by age and by position, the classes of ``metrics.mismatch``.

    ``totals_R`` has the sum of the values before each token, and before the end: R + 1 numbers.
    """
    length = len(totals_R) - 1
    for lag, start, stop in lags:
        sums[f"age/{lag}"] += totals_R[stop] - totals_R[start]
    for start, stop in pairwise((*(place for place in POSITIONS if place < length), length)):
        sums[f"position/{start}"] += totals_R[stop] - totals_R[start]


def _classes(examples: Sequence[Example]) -> list[str]:
    """Return the names of all classes of these samples' tokens."""
    ages = sorted({lag for example in examples for lag, _, _ in example.lags})
    longest = max(example.num_response for example in examples)
    return [f"age/{age}" for age in ages] + [f"position/{start}" for start in POSITIONS if start < longest]


@torch.no_grad()
def _differing(experts_TLK: Tensor, own_TLK: Tensor, is_known_T: Tensor) -> Tensor:
    """Return for each token how many of the engine's experts the routers would not have chosen, int32."""
    num_tokens, num_layers, num_chosen = experts_TLK.shape
    tokens = max(1, _COMPARED // (num_layers * num_chosen**2))  # 16 MB of results at a time
    parts = [
        (experts_TLK[first : first + tokens].unsqueeze(3) != own_TLK[first : first + tokens].unsqueeze(2))
        .all(3)
        .sum((1, 2), dtype=torch.int32)
        for first in range(0, max(1, num_tokens), tokens)
    ]
    return torch.where(is_known_T, torch.cat(parts), 0)


def _gathered(row: Microbatch, places_T: NDArray[np.int64], layers: slice) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Copy the routes at these positions of the row, whose samples are in order, and mark the known ones.

    Samples' arrays may be views of memory that all ranks of a machine share.  Only the rank's own part is copied, one
    microbatch at a time: the routes of 512 answers of 32,768 tokens take 6.4 GB.
    """
    assert row.routes is not None, "checked by the caller"
    given = [routes.experts_NLK for routes in row.routes if routes is not None]
    experts_TLK = np.zeros((len(places_T), layers.stop - layers.start, given[0].shape[2]), np.result_type(*given))
    is_known_T = np.zeros(len(places_T), np.bool_)
    samples_T = np.searchsorted(row.edges, places_T, "right") - 1
    cuts = np.searchsorted(samples_T, np.arange(len(row.routes) + 1))
    for routes, begin, (start, stop) in zip(row.routes, row.edges, pairwise(cuts), strict=False):
        if routes is None:
            continue
        places = places_T[start:stop] - begin
        is_inside = places < len(routes)  # not padding
        experts_TLK[start:stop][is_inside] = routes.experts_NLK[places[is_inside], layers]
        is_known_N = np.ones(len(routes), np.bool_)
        for first, last in routes.missing:
            is_known_N[first:last] = False
        is_known_T[start:stop][is_inside] = is_known_N[places[is_inside]]
    return experts_TLK, is_known_T
