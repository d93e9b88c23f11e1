"""Training steps on several ranks, one process each, over gloo: every layout gives the weights of one process."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engines.megatron import rank_process
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.rank_process import case
from tests.engines.megatron.tiny import write_checkpoint
from tests.forks import Fork

DEADLINE_S = 720
"""Limit for a process that imports Megatron, which takes 10 to 50 s on two shared cores."""

PLAIN = {"use_distributed_optimizer": False, "overlap_grad_reduce": False}
"""Settings with which every rank has whole gradients that can be compared."""
TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CONTEXT, EXPERT = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_activations": True}
UNEVEN = {"decoder_first_pipeline_num_layers": 1}
LAYOUTS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    # layouts of four ranks first: the other two ranks then end and wait for no other
    4: {
        "tensor, pipeline": ("dense", TENSOR | PIPELINE | UNEVEN),
        "tensor, experts": ("mixture", TENSOR | EXPERT),
        "tensor, context": ("latent", TENSOR | CONTEXT | PLAIN),
        "pipeline, experts": ("mixture", PIPELINE | EXPERT | PLAIN),
    },
    2: {
        "data": ("dense", PLAIN),
        "data, distributed optimizer": ("mixture", {}),
        "tensor": ("dense", TENSOR | PLAIN),
        "tensor, mixture": ("mixture", TENSOR | PLAIN),
        "pipeline": ("dense", PIPELINE | PLAIN | UNEVEN),
        "context": ("dense", CONTEXT | PLAIN | SELECTIVE),
        "context, mixture": ("mixture", CONTEXT | FULL),
        "pipeline, latent attention": ("latent", PIPELINE | PLAIN | UNEVEN),
        "experts": ("mixture", EXPERT | PLAIN),
    },
}
Alone = dict[str, tuple[dict[str, Any], Path]]
"""The results of one process by model, with their folders."""
Seen = dict[str, tuple[list[dict[str, Any]], Path]]
"""The results of all ranks by layout, with their folders."""
CASES = [(size, name) for size, layouts in LAYOUTS.items() for name in layouts]
WITH_GRADIENTS = [(size, name) for size, name in CASES if PLAIN.items() <= LAYOUTS[size][name][1].items()]
CENTERED = "mixture"
"""The model that is trained with score centering."""
SAVED = ("data, distributed optimizer", "experts", "tensor, pipeline")
POISONED = ("data", "data, distributed optimizer", "tensor", "pipeline", "context", "experts", "tensor, pipeline")
"""Layouts with a poisoned step: together they share a model and sum gradients in every way."""
RESUMED: dict[str, dict[str, Any]] = {"dense": TENSOR, "mixture": EXPERT}
"""The layout in which two ranks resume the checkpoint of one process, by model."""

pytestmark = [
    pytest.mark.timeout(3 * DEADLINE_S),
    pytest.mark.filterwarnings("ignore:::torch"),  # torch warns about calls by Megatron
]


@contextmanager
def other_ranks(cases: list[dict[str, Any]]) -> Iterator[list[subprocess.Popen[str]]]:
    """All ranks but the first, each in a separate process."""
    with ExitStack() as stack:
        others = range(1, max(case["ranks"] for case in cases))
        yield [stack.enter_context(_process(rank, cases)) for rank in others]


@contextmanager
def _process(rank: int, cases: list[dict[str, Any]]) -> Iterator[subprocess.Popen[str]]:
    process = Fork(rank_process.__name__, rank, json.dumps(cases), stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hf")
    return {
        "dense": write_checkpoint(folder / "dense", tied=True, num_hidden_layers=3),
        "mixture": write_checkpoint(folder / "mixture", moe=True),
        "latent": write_tiny(folder / "latent", TINY["deepseek-v3"]),
    }


@pytest.fixture(scope="module")
def ran(checkpoints: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """The results of each rank by target: of one process alone, then of four, then of two of the four."""
    folder = tmp_path_factory.mktemp("ran")
    alone = [
        case(path, folder / name, saves=name in RESUMED, poisons=name == "dense", centers=name == CENTERED)
        for name, path in checkpoints.items()
    ]
    together = [
        case(
            checkpoints[model],
            folder / f"{size} {name}",
            ranks=size,
            saves=name in SAVED,
            poisons=name in POISONED,
            centers=model == CENTERED,
            **parallel,
        )
        for size, layouts in LAYOUTS.items()
        for name, (model, parallel) in layouts.items()
    ]
    together += [
        case(
            checkpoints[name],
            folder / f"{name} resumed",
            ranks=2,
            resume=folder / name,
            centers=name == CENTERED,
            **parallel,
        )
        for name, parallel in RESUMED.items()
    ]
    with other_ranks(together) as others:
        mine = [rank_process.run(0, each) for each in alone + together]
        theirs = [iter(json.loads(each.communicate(timeout=DEADLINE_S)[0].splitlines()[-1])) for each in others]
    found = {}
    for each, first in zip(alone + together, mine, strict=True):
        found[Path(each["target"]).name] = [first, *(next(other) for other in theirs[: each["ranks"] - 1])]
    return folder, found


@pytest.fixture(scope="module")
def alone(ran: tuple[Path, dict[str, list[Any]]], checkpoints: Mapping[str, Path]) -> Alone:
    """The results of one process by model, with their folders."""
    folder, found = ran
    return {name: (found[name][0], folder / name) for name in checkpoints}


@pytest.fixture(scope="module")
def seen(ran: tuple[Path, dict[str, list[Any]]]) -> Seen:
    """The results of all ranks by layout, with their folders."""
    folder, found = ran
    return {name: (ranks, folder / name) for name, ranks in found.items()}


@pytest.mark.parametrize(("size", "name"), CASES)
def test_reports_are_those_of_one_process(seen: Seen, alone: Alone, size: int, name: str) -> None:
    (first, *others), _ = seen[f"{size} {name}"]
    expected, _ = alone[LAYOUTS[size][name][0]]
    assert first["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-6)  # sums of terms around 1
    assert first["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for got, numbers in zip(first["metrics"], expected["metrics"], strict=True):
        assert got == pytest.approx(numbers, rel=1e-5, abs=1e-6)
    for got, row in zip(first["logprobs"], expected["logprobs"], strict=True):
        assert got == pytest.approx(row, abs=1e-5)
    assert first["refused"] is (True if name in POISONED else None)
    for other in others:
        assert other["logprobs"] == []
        assert {**other, "logprobs": first["logprobs"]} == first


@pytest.mark.parametrize(("size", "name"), CASES)
def test_weights_are_those_of_one_process(seen: Seen, alone: Alone, size: int, name: str) -> None:
    _same_weights(*_folders(seen, alone, size, name))


@pytest.mark.parametrize(("size", "name"), WITH_GRADIENTS)
def test_gradients_are_those_of_one_process(seen: Seen, alone: Alone, size: int, name: str) -> None:
    one, many = (torch.load(folder / "gradients.pt") for folder in _folders(seen, alone, size, name))
    assert one.keys() == many.keys()
    for weight, grad in one.items():
        assert (many[weight] - grad).abs().max() <= 1e-5 * grad.abs().max(), weight


@pytest.mark.parametrize("model", RESUMED)
def test_two_ranks_resume_the_checkpoint_of_one(seen: Seen, alone: Alone, model: str) -> None:
    (first, _), folder = seen[f"{model} resumed"]
    expected, before = alone[model]
    _same_step(first, expected)
    _same_weights(folder, before)


@pytest.mark.parametrize(("size", "name"), [each for each in CASES if each[1] in SAVED])
def test_one_rank_resumes_the_checkpoint_of_several(
    seen: Seen, checkpoints: Mapping[str, Path], tmp_path: Path, size: int, name: str
) -> None:
    (expected, *_), folder = seen[f"{size} {name}"]
    model, parallel = LAYOUTS[size][name]
    plain = {setting: parallel[setting] for setting in PLAIN if setting in parallel}
    alone = case(checkpoints[model], tmp_path, resume=folder, centers=model == CENTERED, **plain)
    _same_step(rank_process.run(0, alone), expected)
    _same_weights(tmp_path, folder)


def _same_step(resumed: dict[str, Any], straight: dict[str, Any]) -> None:
    assert resumed["losses"] == pytest.approx(straight["losses"][-1:], rel=1e-5, abs=1e-6)
    assert resumed["norms"] == pytest.approx(straight["norms"][-1:], rel=1e-5)
    for got, row in zip(resumed["logprobs"], straight["logprobs"], strict=True):
        assert got == pytest.approx(row, abs=1e-5)


def _same_weights(*folders: Path) -> None:
    one, many = (load_file(folder / "hf" / "model.safetensors") for folder in folders)
    assert one.keys() == many.keys()
    assert max((one[tensor] - many[tensor]).abs().max().item() for tensor in one) < 1e-5


def _folders(seen: Seen, alone: Alone, size: int, name: str) -> tuple[Path, Path]:
    return alone[LAYOUTS[size][name][0]][1], seen[f"{size} {name}"][1]
