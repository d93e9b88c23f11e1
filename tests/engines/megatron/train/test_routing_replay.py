"""Trainers that replay deliberately wrong routes: every parallel layout gives the numbers of one process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engines.megatron.train.optimizer_updates import updates_of
from asyncrl.models.shape import read_shape
from tests.engines.megatron import routing_process
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.routed import MIXTURES, routed
from tests.engines.megatron.routing_process import case, other_ranks
from tests.engines.megatron.tiny import one_rank, random_batch, trainer_settings

DEADLINE_S = 1800
"""Limit for all cases of one file on two shared cores; they take 80 s alone."""

TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CONTEXT, EXPERT = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
UNEVEN = {"decoder_first_pipeline_num_layers": 1}
PLAIN = {"use_distributed_optimizer": False, "overlap_grad_reduce": False}
FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_activations": True}
MIXTURE_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    # layouts of four ranks first: the other two ranks then end and wait for no other
    4: {
        "tensor, pipeline": TENSOR | PIPELINE | UNEVEN,
        "tensor, experts": TENSOR | EXPERT,
        "tensor, context": TENSOR | CONTEXT | PLAIN,
        "pipeline, experts, full recomputation": PIPELINE | EXPERT | FULL,
    },
    2: {
        "data": PLAIN,
        "data, distributed optimizer": {},
        "tensor": TENSOR,
        "tensor, experts": TENSOR | EXPERT | {"expert_tensor_parallel_size": 1},
        "pipeline": PIPELINE,
        "pipeline, full recomputation": PIPELINE | FULL | UNEVEN,
        "pipeline, recomputed mixtures": PIPELINE | MIXTURE_AGAIN,
        "context, recomputed attention": CONTEXT | SELECTIVE,
        "context, full recomputation": CONTEXT | FULL,
        "experts": EXPERT,
    },
    1: {"full recomputation": FULL, "recomputed mixtures": MIXTURE_AGAIN},
}
WHOLE = ("qwen3-moe", "deepseek-v3")
"""Families with all layouts: they differ in everything that replay meets (scores, groups, latent attention, layers)."""
SHARED = ("tensor, experts", "pipeline", "context, recomputed attention", "recomputed mixtures")
"""The layouts of the other families, on two ranks at most: on two cores, four ranks take three times as long."""
CASES = [
    (family, size, name)
    for family in MIXTURES
    for size, layouts in LAYOUTS.items()
    for name in layouts
    if family in WHOLE or (size < 4 and name in SHARED)
]
Results = dict[tuple[str, int, str], list[dict[str, Any]]]
"""The results of all ranks by family, number of ranks and layout."""

pytestmark = [
    pytest.mark.timeout(DEADLINE_S),
    pytest.mark.filterwarnings("ignore:::torch"),  # torch warns about calls by Megatron
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of four layers: an even second stage begins after a mixture, also where the first layer is dense."""
    folder = tmp_path_factory.mktemp("hf")
    deeper = {name: replace(TINY[name], config={**TINY[name].config, "num_hidden_layers": 4}) for name in MIXTURES}
    return {name: write_tiny(folder / name, tiny) for name, tiny in deeper.items()}


@pytest.fixture(scope="module")
def results(checkpoints: dict[str, Path]) -> Results:
    """The results of every layout, and of one process with ("", 1) and without ("own", 1) routes."""
    keys = sorted(CASES, key=lambda each: -each[1])
    keys += [(family, 1, name) for family in MIXTURES for name in ("", "own")]
    cases = [
        case(checkpoints[family], ranks=size, replays=name != "own", **LAYOUTS[size].get(name, {}))
        for family, size, name in keys
    ]
    with other_ranks(cases) as others:
        mine = [routing_process.run(0, each) for each in cases]
        theirs = [iter(json.loads(each.communicate(timeout=180)[0].splitlines()[-1])) for each in others]
    return {
        key: [first, *(next(other) for other in theirs[: key[1] - 1])] for key, first in zip(keys, mine, strict=True)
    }


@pytest.mark.parametrize(("family", "size", "name"), CASES)
def test_every_layout_gives_the_numbers_of_one_process(results: Results, family: str, size: int, name: str) -> None:
    first, *others = results[family, size, name]
    (expected,) = results[family, 1, ""]
    assert far_apart(first["logprobs"], expected["logprobs"]) < 1e-5
    assert first["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-6)
    assert first["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for got, numbers in zip(first["metrics"], expected["metrics"], strict=True):
        assert got == pytest.approx(numbers, rel=1e-5, abs=1e-6)
    for other in others:
        assert other["metrics"] == first["metrics"]


@pytest.mark.parametrize("family", MIXTURES)
def test_log_probs_without_replay_are_far_from_those_with_it(results: Results, family: str) -> None:
    (replayed,), (own,) = results[family, 1, ""], results[family, 1, "own"]
    assert far_apart(replayed["logprobs"][:1], own["logprobs"][:1]) > 0.5


@pytest.mark.parametrize("family", MIXTURES)
def test_a_step_reports_the_share_of_missing_and_of_differing_routes(results: Results, family: str) -> None:
    (replayed,), (own,) = results[family, 1, ""], results[family, 1, "own"]
    whole, with_gaps = replayed["metrics"]
    assert whole["train/routes_missing"] == 0
    assert 0.1 < with_gaps["train/routes_missing"] < 0.6
    assert all(0.3 < each["train/routes_differ"] < 0.9 for each in (whole, with_gaps))  # random routes
    classes = {f"routes_differ/{name}" for name in ("age/0", "age/1", "age/2", "position/0")}
    for each in (whole, with_gaps):
        assert {name for name in each if name.startswith("routes_differ/")} == classes
        ages = [each[f"routes_differ/age/{lag}"] for lag in range(3)]
        assert min(ages) < each["routes_differ/position/0"] < max(ages)
    assert not any(name.startswith(("train/routes", "routes_differ")) for each in own["metrics"] for name in each)


def far_apart(one: list[Any], other: list[Any]) -> float:
    """The largest difference of two lists of steps, samples and log-probs."""
    pairs = [
        (first, second)
        for steps in zip(one, other, strict=True)
        for samples in zip(*steps, strict=True)
        for first, second in zip(*samples, strict=True)
    ]
    return float(max(abs(first - second) for first, second in pairs))


def test_reference_model_and_critic_choose_for_themselves(checkpoints: dict[str, Path]) -> None:
    checkpoint = checkpoints["qwen3-moe"]
    settings = trainer_settings(checkpoint, advantage_estimator="ppo", kl_coef=0.1, max_tokens_per_gpu=24)
    batch = random_batch()
    plain, with_routes = (updates_of(each, 1) for each in (batch, routed(batch, read_shape(checkpoint), seed=0)))
    with one_rank(settings) as rank:
        critic = rank._critic  # noqa: SLF001
        assert critic is not None
        # The critic's head begins at 0, and would hide what its layers compute.
        critic.learner.model.value_head.weight.data.fill_(1.0)
        for compute in (rank._reference_logprobs, critic.values):  # noqa: SLF001
            own, replayed = compute(plain), compute(with_routes)
            assert own.keys() == replayed.keys()
            assert all((own[index] == replayed[index]).all() for index in own)
        rank.train(batch)
        routers = [layer.mlp.router for layer in critic.learner.model.decoder.layers]
        assert all(router.router_replay is None for router in routers)
