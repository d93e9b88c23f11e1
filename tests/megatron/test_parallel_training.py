"""Training steps on several ranks, one process each, over gloo: every layout makes the weights of one process."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import rank_process
import torch
from families import TINY, write_tiny
from rank_process import case
from safetensors.torch import load_file
from tiny import free_port, write_checkpoint

DEADLINE_S = 240
"""A process that imports Megatron on two shared cores needs 10 to 50 s."""

PLAIN = {"use_distributed_optimizer": False, "overlap_grad_reduce": False}
"""Every rank then has whole gradients to be compared."""
TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
CONTEXT, EXPERT = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
FULL = {"recompute_granularity": "full"}
UNEVEN = {"decoder_first_pipeline_num_layers": 1}
LAYOUTS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    2: {
        "data": ("dense", PLAIN),
        "data, distributed optimizer": ("mixture", {}),
        "tensor": ("dense", TENSOR | PLAIN),
        "tensor, mixture": ("mixture", TENSOR | PLAIN),
        "pipeline": ("dense", PIPELINE | PLAIN | UNEVEN),
        "context": ("dense", CONTEXT | PLAIN),
        "context, mixture": ("mixture", CONTEXT | FULL),
        "pipeline, latent attention": ("latent", PIPELINE | PLAIN | UNEVEN),
        "experts": ("mixture", EXPERT | PLAIN),
    },
    4: {
        "tensor, pipeline": ("dense", TENSOR | PIPELINE | UNEVEN),
        "tensor, experts": ("mixture", TENSOR | EXPERT),
        "tensor, context": ("latent", TENSOR | CONTEXT | PLAIN),
        "pipeline, experts": ("mixture", PIPELINE | EXPERT | PLAIN),
    },
}
CASES = [(size, name) for size, layouts in LAYOUTS.items() for name in layouts]
RESUMED = "resumed"
WITH_GRADIENTS = [(size, name) for size, name in CASES if PLAIN.items() <= LAYOUTS[size][name][1].items()]

pytestmark = [
    pytest.mark.timeout(3 * DEADLINE_S),
    pytest.mark.filterwarnings("ignore:::torch"),  # what it warns about when Megatron calls it
]


@contextmanager
def other_ranks(world_size: int, cases: list[dict[str, Any]]) -> Iterator[list[subprocess.Popen[str]]]:
    """All ranks but the first, as processes of their own."""
    with ExitStack() as stack:
        yield [stack.enter_context(_process(rank, world_size, cases)) for rank in range(1, world_size)]


@contextmanager
def _process(rank: int, world_size: int, cases: list[dict[str, Any]]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, rank_process.__file__, str(rank), str(world_size), json.dumps(cases)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    return {
        "dense": write_checkpoint(folder / "dense", tied=True, num_hidden_layers=3),
        "mixture": write_checkpoint(folder / "mixture", moe=True),
        "latent": write_tiny(folder / "latent", TINY["deepseek-v3"]),
    }


@pytest.fixture(scope="module")
def alone(checkpoints, tmp_path_factory):
    """What one process makes of each model."""
    folder = tmp_path_factory.mktemp("alone")
    cases = {name: case(path, folder / name, free_port()) for name, path in checkpoints.items()}
    return {name: (rank_process.run(0, 1, each), folder / name) for name, each in cases.items()}


@pytest.fixture(scope="module")
def seen(checkpoints, alone, tmp_path_factory):
    """What all ranks make of each layout; ``alone`` has left its process group by then."""
    folder = tmp_path_factory.mktemp("layouts")
    found = {}
    for size, layouts in LAYOUTS.items():
        cases = [
            case(checkpoints[model], folder / f"{size} {name}", free_port(), **parallel)
            for name, (model, parallel) in layouts.items()
        ]
        if size == 2:
            cases.append(case(checkpoints["dense"], folder / RESUMED, free_port(), resume=alone["dense"][1], **TENSOR))
        with other_ranks(size, cases) as others:
            mine = [rank_process.run(0, size, each) for each in cases]
            theirs = [json.loads(each.communicate(timeout=DEADLINE_S)[0].splitlines()[-1]) for each in others]
        for each, *ranks in zip(cases, mine, *theirs, strict=True):
            found[Path(each["target"]).name] = ranks, Path(each["target"])
    return found


@pytest.mark.parametrize(("size", "name"), CASES)
def test_reports_are_those_of_one_process(seen, alone, size, name):
    (first, *others), _ = seen[f"{size} {name}"]
    expected, _ = alone[LAYOUTS[size][name][0]]
    assert first["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-6)  # sums of terms around 1
    assert first["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for got, numbers in zip(first["metrics"], expected["metrics"], strict=True):
        assert got == pytest.approx(numbers, rel=1e-5, abs=1e-6)
    for got, row in zip(first["logprobs"], expected["logprobs"], strict=True):
        assert got == pytest.approx(row, abs=1e-5)
    assert first["refused"] and expected["refused"]
    for other in others:
        assert other["logprobs"] == []
        assert {**other, "logprobs": first["logprobs"]} == first


@pytest.mark.parametrize(("size", "name"), CASES)
def test_weights_are_those_of_one_process(seen, alone, size, name):
    one, many = (load_file(folder / "hf" / "model.safetensors") for folder in _folders(seen, alone, size, name))
    assert one.keys() == many.keys()
    assert max((one[tensor] - many[tensor]).abs().max().item() for tensor in one) < 1e-5


@pytest.mark.parametrize(
    ("size", "name"), [each for each in CASES if PLAIN.items() <= LAYOUTS[each[0]][each[1]][1].items()]
)
def test_gradients_are_those_of_one_process(seen, alone, size, name):
    one, many = (torch.load(folder / "gradients.pt") for folder in _folders(seen, alone, size, name))
    assert one.keys() == many.keys()
    for weight, grad in one.items():
        assert (many[weight] - grad).abs().max() <= 1e-5 * grad.abs().max(), weight


def test_one_process_stops_and_two_that_share_the_matrices_go_on(seen, alone):
    (first, _), folder = seen[RESUMED]
    expected, before = alone["dense"]
    _same_step(first, expected)
    one, two = (load_file(each / "hf" / "model.safetensors") for each in (before, folder))
    assert max((one[tensor] - two[tensor]).abs().max().item() for tensor in one) < 1e-5


def test_four_that_share_layers_and_matrices_stop_and_one_process_goes_on(seen, alone, checkpoints, tmp_path):
    (expected, *_), folder = seen["4 tensor, pipeline"]
    _same_step(rank_process.run(0, 1, case(checkpoints["dense"], tmp_path, free_port(), resume=folder)), expected)


def _same_step(resumed, straight):
    assert resumed["losses"] == pytest.approx(straight["losses"][-1:], rel=1e-5, abs=1e-6)
    assert resumed["norms"] == pytest.approx(straight["norms"][-1:], rel=1e-5)
    for got, row in zip(resumed["logprobs"], straight["logprobs"], strict=True):
        assert got == pytest.approx(row, abs=1e-5)


def _folders(seen, alone, size, name):
    return alone[LAYOUTS[size][name][0]][1], seen[f"{size} {name}"][1]
