"""Under tensor, pipeline and expert parallelism, the parts on all ranks together are the same model."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.engines.megatron.weights.fp8 import fp8_of
from tests.engines.megatron import layouts
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.layouts import DEADLINE_S, Tensors, layout, loaded, logits_and_gradients, processes
from tests.engines.megatron.tiny import free_port
from tests.engines.megatron.weights.fp8_checkpoints import in_fp8
from tests.forks import Fork

FAMILIES = ("qwen2.5-tied", "glm4", "glm4.5", "deepseek-v3")
"""Families that together have every rule of conversion and every way of splitting."""
MIXTURES = ("glm4.5", "deepseek-v3")
Alone = dict[str, tuple[torch.Tensor | None, Tensors]]
"""Logits and gradients by family."""
Seen = dict[tuple[str, str], dict[str, Any]]
"""The results of ``layouts.run`` by layout and family."""
LAYOUTS = {
    "tp": {"tensor_model_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "tp-ep": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
CASES = [(name, family) for name in LAYOUTS for family in FAMILIES if "ep" not in name or family in MIXTURES]
CASES.remove(("pp", "deepseek-v3"))  # trained and saved in test_parallel_training
FP8_CASES = [("tp", "glm4-fp8"), ("pp", "glm4-fp8"), ("tp-ep", "glm4.5-fp8")]

pytestmark = pytest.mark.timeout(3 * DEADLINE_S)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of models with four layers, two for each pipeline stage."""
    folder = tmp_path_factory.mktemp("layouts")
    deeper = {name: replace(TINY[name], config={**TINY[name].config, "num_hidden_layers": 4}) for name in FAMILIES}
    fp8 = {f"{name}-fp8": in_fp8(write_tiny(folder / f"{name}-fp8", deeper[name])) for name in ("glm4", "glm4.5")}
    return {name: write_tiny(folder / name, tiny) for name, tiny in deeper.items()} | fp8


@pytest.fixture(scope="module")
def alone(checkpoints: Mapping[str, Path]) -> Alone:
    """Logits and gradients of one process."""
    with processes(0, 1, free_port()), layout():
        return {name: logits_and_gradients(*loaded(checkpoints[name])) for name in FAMILIES}


@pytest.fixture(scope="module")
def sent_alone(checkpoints: Mapping[str, Path], alone: Alone) -> dict[str, Tensors]:
    """The tensors that one process sends to engines in fp8.

    ``alone`` is requested first, because it leaves its process group.
    """
    with processes(0, 1, free_port()), layout():
        found = {}
        for name in {name for _, name in FP8_CASES}:
            model, shape = loaded(checkpoints[name])
            fp8 = fp8_of(checkpoints[name], shape)
            assert fp8 is not None
            found[name] = dict(layouts.fp8_sent(model, shape, fp8))
        return found


@pytest.fixture(scope="module")
def seen(checkpoints: Mapping[str, Path], alone: Alone, sent_alone: dict[str, Tensors]) -> Seen:
    """The results of two processes for every family and layout.

    The fixtures of one process are requested first, because they leave their process group.
    """
    port, cases = free_port(), [(LAYOUTS[name], str(checkpoints[family])) for name, family in (*CASES, *FP8_CASES)]
    other = Fork(layouts.__name__, 1, 2, port, json.dumps(cases))
    try:
        found = layouts.run(0, 2, port, cases)
        assert other.wait(timeout=DEADLINE_S) == 0
    finally:
        other.kill()
        other.wait()
    return dict(zip((*CASES, *FP8_CASES), found, strict=True))


@pytest.mark.parametrize(("name", "family"), CASES)
def test_exported_weights_equal_the_checkpoint(
    seen: Seen, checkpoints: Mapping[str, Path], name: str, family: str
) -> None:
    exported, before = seen[name, family]["exported"], load_file(checkpoints[family] / "model.safetensors")
    assert exported.keys() == before.keys()
    assert all(torch.equal(exported[tensor], before[tensor]) for tensor in before)


@pytest.mark.parametrize(("name", "family"), FP8_CASES)
def test_fp8_weights_sent_by_two_ranks_equal_those_of_one(
    seen: Seen, sent_alone: dict[str, Tensors], checkpoints: Mapping[str, Path], name: str, family: str
) -> None:
    exported, expected = seen[name, family]["exported"], sent_alone[family]
    assert exported.keys() == expected.keys()
    assert exported.keys() == load_file(checkpoints[family] / "model.safetensors").keys()
    for tensor in expected:
        assert exported[tensor].dtype == expected[tensor].dtype
        assert torch.equal(exported[tensor].float(), expected[tensor].float()), tensor


@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_rank_holds_a_part_only(seen: Seen, checkpoints: Mapping[str, Path], name: str, family: str) -> None:
    whole = sum(tensor.numel() for tensor in load_file(checkpoints[family] / "model.safetensors").values())
    assert seen[name, family]["held"] < 0.8 * whole


@pytest.mark.parametrize(("name", "family"), CASES)
def test_logits_and_gradients_are_those_of_one_process(seen: Seen, alone: Alone, name: str, family: str) -> None:
    logits, grads = alone[family]
    found = seen[name, family]
    if name != "pp":  # the logits are on the other rank
        assert logits is not None
        assert (found["logits"] - logits).abs().max() < 1e-5
    assert found["grads"].keys() == grads.keys()
    for tensor, grad in grads.items():
        assert (found["grads"][tensor] - grad).abs().max() <= 1e-5 * grad.abs().max(), tensor
