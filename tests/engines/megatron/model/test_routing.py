"""Routers that replay given routes compute the numbers of transformers' models with the same experts."""

import pickle
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from megatron.core.transformer.transformer_config import TransformerConfig

from asyncrl.engines.megatron.model import routing
from asyncrl.engines.megatron.model.packing import Packing, examples_of, microbatches
from asyncrl.engines.megatron.model.routing import RoutingReplay, add_by_class, check_replayable
from asyncrl.errors import ConfigError, TrainerFailed
from asyncrl.metrics.mismatch import Mismatch
from asyncrl.models.shape import ModelShape
from asyncrl.token_columns import Routes
from asyncrl.types import FinishReason, Sample, ScoredSample, Span, Weights
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.layouts import (
    LENGTHS,
    Tensors,
    examples,
    layout,
    loaded,
    logit_weights,
    logits_and_gradients,
    processes,
    sequences,
)
from tests.engines.megatron.model.test_families import stacked_as_in_transformers
from tests.engines.megatron.routed import MIXTURES, random_routes, routed
from tests.engines.megatron.tiny import free_port, random_batch

NORMED = replace(TINY["qwen3-moe"], config={**TINY["qwen3-moe"].config, "norm_topk_prob": True})
"""Qwen3 with weights that add up to one: its softmax is over the chosen experts alone."""
Counts = np.ndarray[Any, np.dtype[np.int64]]
MODELS = {name: TINY[name] for name in MIXTURES} | {"qwen3-moe, normed": NORMED}


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with processes(0, 1, free_port()), layout():
        yield


def some_routes(shape: ModelShape) -> list[Routes | None]:
    """Routes of ``sequences``: whole ones, ones with gaps, and none."""
    rng = np.random.default_rng(5)
    missing: list[tuple[tuple[int, int], ...]] = [(), ((0, 3), (30, 37)), (), ()]
    found = [random_routes(shape, length, rng, each) for length, each in zip(LENGTHS, missing, strict=True)]
    return [found[0], found[1], None, found[3]]


class ForcedGate(torch.nn.Module):
    """Qwen3's router with the experts of ``routes``; -1 leaves the choice to the router."""

    def __init__(self, gate: Any, routes: Callable[[], torch.Tensor], counts: list[Counts]) -> None:
        super().__init__()
        self.gate, self.routes, self.counts = gate, routes, counts

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, _, own = self.gate(hidden)
        chosen, differing = forced(self.routes(), own)
        self.counts.append(differing)
        weights = logits.softmax(-1).gather(1, chosen)
        if self.gate.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen


def forced(routes: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, Counts]:
    """Return the experts to use, and how many given ones are not among each token's own."""
    differing = [
        len(set(given) - set(mine)) if given[0] >= 0 else 0
        for given, mine in zip(routes.tolist(), own.tolist(), strict=True)
    ]
    return torch.where(routes >= 0, routes, own), np.array(differing)


def forced_choice(mixture: Any, routes: Callable[[], torch.Tensor], counts: list[Counts]) -> Callable[..., Any]:
    """The choice of a mixture of DeepSeek's kind, with the experts of ``routes``."""
    choose = mixture.route_tokens_to_experts

    def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own, _ = choose(logits)
        chosen, differing = forced(routes(), own)
        counts.append(differing)
        weights = logits.sigmoid().gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * mixture.routed_scaling_factor

    return route


def reference(checkpoint: Path, routes: Sequence[Routes | None]) -> tuple[torch.Tensor, Tensors, list[Counts]]:
    """Logits, gradients and number of differing choices of each token by transformers with the experts of ``routes``.

    The numbers of a sample are those of its positions.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    present: list[torch.Tensor] = []
    mixtures = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    num_chosen = model.config.num_experts_per_tok
    counts: list[Counts] = []
    for number, mixture in enumerate(mixtures):
        layer_routes = lambda number=number: present[0][:, number]  # noqa: E731
        if hasattr(mixture, "route_tokens_to_experts"):
            mixture.route_tokens_to_experts = forced_choice(mixture, layer_routes, counts)
        else:
            mixture.gate = ForcedGate(mixture.gate, layer_routes, counts)
    logits, differing = [], []
    for tokens, given in zip(sequences(), routes, strict=True):
        ids = np.full((len(tokens), len(mixtures), num_chosen), -1)
        if given is not None:
            ids[:] = given.experts_NLK
            for start, stop in given.missing:
                ids[start:stop] = -1
        present[:] = [torch.from_numpy(ids)]
        logits.append(model(tokens[None], use_cache=False).logits[0])
        differing.append(np.sum(counts, 0))
        counts.clear()
    (torch.cat(logits) * logit_weights()).sum().backward()  # type: ignore[no-untyped-call]  # torch is untyped
    grads = {name.replace("gate.gate.", "gate."): parameter.grad for name, parameter in model.named_parameters()}
    return torch.cat(logits).detach(), grads, differing


def share_of_lag(wanted: int | None, routes: Sequence[Routes | None], differing: Sequence[Counts]) -> float:
    """Differing choices per trained token of this lag, or of any, whose route is known; token by token."""
    found = []
    for example, given, counts in zip(examples(routes), routes, differing, strict=True):
        for lag, start, stop in example.lags:
            for token in range(start, stop):
                position = example.num_inputs - example.num_response + token
                is_known = given is not None and not any(first <= position < last for first, last in given.missing)
                if is_known and example.loss_mask[token] and wanted in (None, lag):
                    found.append(int(counts[position]))
    return sum(found) / len(found)


def test_routes_of_tokens_are_grouped_as_their_mismatch_is() -> None:
    logprobs = np.random.default_rng(0).normal(-1, 1, 5_000).astype(np.float32)
    spans = ((3, 0, 700), (1, 700, 4_500), (1, 4_500, 5_000))
    sample = Sample(
        index=0,
        token_ids=(0,) * 5_000,
        logprobs=array("f", logprobs.tolist()),
        spans=tuple(
            Span(weights=Weights(version=9 - lag, step=9 - lag), start=start, stop=stop) for lag, start, stop in spans
        ),
        text="",
        finish=FinishReason.STOP,
        seconds=1.0,
    )
    mismatch = Mismatch(9)
    mismatch.add(ScoredSample(sample=sample, reward=0.0, loss_mask=(1,) * 5_000), (logprobs + 1).tolist())
    ones = Counter[str]()
    add_by_class(ones, range(5_001), spans)
    grouped = {name.removeprefix("mismatch/").rpartition("/")[0] for name in mismatch.numbers()} - {""}
    assert {name for name, total in ones.items() if total} == grouped
    assert ones["age/1"] == 4_300
    assert (ones["position/1024"], ones["position/4096"]) == (3_072, 904)


@pytest.mark.parametrize("family", MODELS)
def test_wrong_routes_give_the_logits_gradients_and_counts_of_transformers(tmp_path: Path, family: str) -> None:
    checkpoint = write_tiny(tmp_path, MODELS[family])
    model, shape = loaded(checkpoint)
    routes = some_routes(shape)
    expected, expected_grads, differing = reference(checkpoint, routes)
    replay = RoutingReplay(model)
    replay.begin(examples(routes))
    got, grads = logits_and_gradients(model, shape, replay, routes)
    assert got is not None
    assert (got.log_softmax(-1) - expected.log_softmax(-1)).abs().max() < 1e-5
    for name, grad in expected_grads.items():
        assert (stacked_as_in_transformers(grads, name) - grad).abs().max() < 1e-5 * grad.abs().max(), name
    replay.read_counts()
    told = replay.metrics(examples(routes))
    experts = shape.experts
    assert experts is not None
    num_each = (shape.num_layers - experts.num_dense_layers) * experts.num_chosen
    num_known = sum(LENGTHS) - 10 - LENGTHS[2]
    assert told == {
        "train/routes_missing": pytest.approx((10 + LENGTHS[2]) / sum(LENGTHS)),
        "train/routes_differ": pytest.approx(sum(each.sum() for each in differing) / (num_known * num_each)),
        "routes_differ/age/0": pytest.approx(share_of_lag(0, routes, differing) / num_each),
        "routes_differ/age/2": pytest.approx(share_of_lag(2, routes, differing) / num_each),
        "routes_differ/position/0": pytest.approx(share_of_lag(None, routes, differing) / num_each),
    }
    own, _ = logits_and_gradients(*loaded(checkpoint))
    assert own is not None
    assert (got.log_softmax(-1) - own.log_softmax(-1)).abs().max() > 0.5


@pytest.mark.parametrize("family", MIXTURES)
def test_missing_rows_give_exactly_what_routers_choose_for_themselves(tmp_path: Path, family: str) -> None:
    checkpoint = write_tiny(tmp_path, TINY[family])
    own, _ = logits_and_gradients(*loaded(checkpoint))
    model, shape = loaded(checkpoint)
    like = random_routes(shape, 1, np.random.default_rng(0))
    routes = [Routes.unknown(length, like) for length in LENGTHS]
    replay = RoutingReplay(model)
    got, _ = logits_and_gradients(model, shape, replay, routes)
    assert own is not None
    assert got is not None
    assert torch.equal(got, own)
    assert replay.metrics(examples(routes)) == {"train/routes_missing": 1.0}


def test_logits_of_experts_that_are_not_replayed_get_no_gradient(tmp_path: Path) -> None:
    model, shape = loaded(write_tiny(tmp_path, NORMED))
    # Every token goes to experts 1 and 2, whatever the routers prefer.
    always = [
        Routes(experts_NLK=np.broadcast_to(np.array([1, 2], np.uint16), (length, shape.num_layers, 2)).copy())
        for length in LENGTHS
    ]
    _, grads = logits_and_gradients(model, shape, RoutingReplay(model), always)
    of_router = grads["model.layers.0.mlp.gate.weight"]
    assert (of_router[[1, 2]].abs().amax(1) > 0).all()
    assert not of_router[[0, 3]].any()


def test_metrics_without_routes_are_none(tmp_path: Path) -> None:
    model, _ = loaded(write_tiny(tmp_path, TINY["qwen3-moe"]))
    assert RoutingReplay(model).metrics(examples([None] * len(LENGTHS))) == {}


@pytest.mark.parametrize(
    ("family", "found"), [("deepseek-v3", "2 mixture layers with 4"), ("qwen3", "0 mixture layers")]
)
def test_routes_of_another_model_are_refused_before_the_step(tmp_path: Path, family: str, found: str) -> None:
    _, other = loaded(write_tiny(tmp_path / "other", TINY["qwen3-moe"]))
    model, _ = loaded(write_tiny(tmp_path / "model", TINY[family]))
    with pytest.raises(TrainerFailed, match=f"sample 3 has routes of 3 layers with 2 experts.*{found}"):
        RoutingReplay(model).begin(examples([None, None, None, some_routes(other)[3]]))


def test_a_batch_reaches_ranks_without_copies_of_its_routes(tmp_path: Path) -> None:
    _, shape = loaded(write_tiny(tmp_path, TINY["qwen3-moe"]))
    batch = routed(random_batch(), shape, seed=0)
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)  # as Ray stores a batch
    received = pickle.loads(pickled, buffers=[bytes(each.raw()) for each in buffers])
    sent, arrived = ([e.routes for group in examples_of(each) for e in group] for each in (batch, received))
    assert all(routes is not None for routes in sent)
    assert sent == arrived
    assert len(buffers) >= len(sent)
    assert all(each is not None and not each.experts_NLK.flags.owndata for each in arrived)
    (row,) = microbatches([e for group in examples_of(received) for e in group], 0, 1, Packing(max_tokens=10**6))
    assert row.routes is not None
    assert all(one is other for one, other in zip(row.routes, arrived, strict=True))


def test_routes_of_another_length_are_refused(tmp_path: Path) -> None:
    _, shape = loaded(write_tiny(tmp_path, TINY["qwen3-moe"]))
    routes = random_routes(shape, LENGTHS[0] + 1, np.random.default_rng(0))
    with pytest.raises(ValueError, match="routes of 6 positions for 5 tokens"):
        replace(examples([None] * len(LENGTHS))[0], routes=routes)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"moe_router_fusion": True}, "moe_router_fusion"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type sinkhorn"),
        ({"moe_router_load_balancing_type": ["none", "sinkhorn"]}, "moe_router_load_balancing_type sinkhorn"),
        ({"moe_router_load_balancing_type": "quantile_balancing"}, "moe_router_load_balancing_type quantile_balancing"),
    ],
)
def test_routers_that_ignore_routes_are_refused_by_name(changes: dict[str, Any], found: str) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=2)
    check_replayable(config)
    for name, value in changes.items():  # set afterwards: the config itself refuses some pairs of settings
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=found):
        check_replayable(config)


def test_many_tokens_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison's memory must not grow with layers and tokens, and ids beyond 255 must compare."""
    draw = torch.Generator().manual_seed(0)
    engines_TLK = torch.rand(50, 3, 300, generator=draw).argsort(-1)[..., :4]
    own_TLK = torch.where(torch.rand(50, 3, 4, generator=draw) < 0.5, engines_TLK, engines_TLK + 300)
    is_known_T = torch.arange(50) % 7 != 0
    expected_T = torch.where(is_known_T, (own_TLK >= 300).sum((1, 2)), 0)
    for compared in (1, 7 * 3 * 16, 2**24):
        monkeypatch.setattr(routing, "_COMPARED", compared)
        own = routing.OwnChoices(engines_TLK.to(torch.uint16), is_known_T)
        for layer in range(3):
            own.note(layer, own_TLK[:, layer].flip(1))
        assert torch.equal(own.differing_T, expected_T.int())
