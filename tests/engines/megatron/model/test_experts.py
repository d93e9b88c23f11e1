"""Stacked experts compute what Megatron's own do, and have the same names and places in checkpoints."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.engines.megatron.checkpoint.host_memory import CheckpointMemory
from asyncrl.engines.megatron.checkpoint.state import load_state, sharded_state
from asyncrl.engines.megatron.model.build import build_model, transformer_config
from asyncrl.engines.megatron.model.experts import GroupedExperts
from asyncrl.engines.megatron.train.learner import Learner
from asyncrl.engines.megatron.weights.hf_weights import export_hf, load_hf, plan_buckets
from asyncrl.engines.megatron.weights.sharding import local_weights
from asyncrl.models.shape import ModelShape, read_shape
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.layouts import CPU, layout, loaded, logits_and_gradients, processes
from tests.engines.megatron.megatron_experts import build_plain, plain_experts
from tests.engines.megatron.tiny import free_port, trainer_settings

pytestmark = pytest.mark.filterwarnings("ignore:::torch")  # torch warns about calls by Megatron

MIXTURES = ("qwen3-moe", "glm4.5", "deepseek-v3")
Build = Callable[[ModelShape, torch.device, torch.dtype], Any]


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with processes(0, 1, free_port()), layout():
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hf")
    return {name: write_tiny(folder / name, TINY[name]) for name in MIXTURES}


def plain(checkpoint: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, ModelShape]:
    """The model in ``checkpoint`` with Megatron's experts, as checkpoints before the stacked experts had it."""
    shape = read_shape(checkpoint)
    model = build_plain(shape, CPU, dtype)
    load_hf(model, shape, checkpoint)
    return model, shape


@pytest.mark.parametrize("family", MIXTURES)
def test_logits_and_gradients_are_those_of_megatron_s_experts(checkpoints: dict[str, Path], family: str) -> None:
    expected, expected_grads = logits_and_gradients(*plain(checkpoints[family]))
    found, grads = logits_and_gradients(*loaded(checkpoints[family]))
    assert found is not None and expected is not None
    assert (found - expected).abs().max() < 1e-5
    assert list(grads) == list(expected_grads)
    for name, grad in expected_grads.items():
        assert (grads[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


@pytest.mark.parametrize("family", MIXTURES)
def test_exports_and_weight_updates_have_the_same_tensors_in_the_same_order(
    checkpoints: dict[str, Path], family: str
) -> None:
    (old, shape), (new, _) = plain(checkpoints[family]), loaded(checkpoints[family])
    before, after = list(export_hf(old, shape)), list(export_hf(new, shape))
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(before, after, strict=True))
    assert plan_buckets(new, shape, 20_000) == plan_buckets(old, shape, 20_000)


def test_a_layer_has_one_parameter_for_each_matrix(checkpoints: dict[str, Path]) -> None:
    model, shape = loaded(checkpoints["glm4.5"])
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    assert names == [f"decoder.layers.{layer}.mlp.experts.weight{number}" for layer in (1, 2) for number in (1, 2)]
    assert shape.experts is not None
    assert len([name for name in local_weights(model) if "local_experts" in name]) == 2 * 2 * shape.experts.num_experts


# ---- places in checkpoints


@dataclass(frozen=True)
class Group:
    """A process group as far as experts ask it."""

    number: int
    members: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.members


LAYOUTS = [(0, 1, 0, 1, 0), (1, 2, 0, 1, 3), (0, 1, 1, 2, 0), (1, 2, 1, 2, 1), (3, 4, 0, 2, 0)]
"""Expert rank and size, expert-tensor rank and size, rank among the data-parallel ranks of experts."""


@pytest.mark.parametrize("sharded_offsets", [(), ((0, 2, 5),)], ids=["layers apart", "layers together"])
@pytest.mark.parametrize("places", LAYOUTS)
def test_the_places_of_each_rank_are_those_of_megatron_s_experts(
    checkpoints: dict[str, Path], places: tuple[int, ...], sharded_offsets: tuple[Any, ...]
) -> None:
    expert, experts, part, parts, data = places
    config = transformer_config(read_shape(checkpoints["glm4.5"]), CPU, torch.float32, ParallelConfig(), "local")
    config.expert_model_parallel_size, config.expert_tensor_parallel_size = experts, parts
    groups = SimpleNamespace(ep=Group(expert, experts), expt_tp=Group(part, parts), expt_dp=Group(data, 4))
    count = config.num_moe_experts // experts
    ours = GroupedExperts(count, config, pg_collection=groups)
    theirs = plain_experts(count, config, groups)
    metadata = {"dp_cp_group": Group(0, 1)}
    found, expected = (
        described(each.sharded_state_dict("mlp.experts.", sharded_offsets, metadata)) for each in (ours, theirs)
    )
    assert found == expected
    for parameter, matrix in ((ours.weight1, "linear_fc1"), (ours.weight2, "linear_fc2")):
        one: Any = getattr(theirs.local_experts[0], matrix).weight
        stacked: Any = parameter
        assert stacked.shape == (count, *one.shape)
        assert (stacked.allreduce, stacked.tensor_model_parallel) == (one.allreduce, one.tensor_model_parallel)
        assert (stacked.partition_dim, stacked.partition_stride) == (one.partition_dim + 1, one.partition_stride)


def described(state: dict[str, Any]) -> set[Any]:
    """Everything that decides where the entries of ``state`` are stored, and by which rank."""
    apply_factories(state)
    found: set[Any] = set()
    for each in nested_values(state):
        if isinstance(each, ShardedObject):
            found.add((each.key, each.global_shape, each.global_offset, each.replica_id))
        else:
            assert isinstance(each, ShardedTensor)
            place = (each.local_shape, each.global_shape, each.global_offset, each.axis_fragmentations)
            found.add((each.key, each.dtype, *place, each.replica_id, each.prepend_axis_num))
    return found


# ---- checkpoints with optimizer states


def learner(build: Build, checkpoint: Path, dtype: str, *, distributed: bool) -> Learner:
    settings = trainer_settings(
        checkpoint, dtype=dtype, parallel=ParallelConfig(use_distributed_optimizer=distributed), clip_grad=1.0
    )
    shape = read_shape(checkpoint)
    model = build(shape, CPU, getattr(torch, dtype))
    load_hf(model, shape, checkpoint)
    return Learner(model, settings, name="policy")


def step(learner: Learner, seed: int) -> float:
    """Update the weights with random gradients that depend on the weight's name alone; return their norm."""
    learner.parallel.zero_grad_buffer()
    learner.optimizer.zero_grad()
    parts: dict[str, Any] = local_weights(learner.model)
    for name, part in parts.items():
        if part.requires_grad:
            generator = torch.Generator().manual_seed(seed + sum(name.encode()))
            part.main_grad.copy_(torch.randn(part.shape, generator=generator))
    _, norm, _ = learner.optimizer.step()
    return float(norm)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: part.detach().clone() for name, part in local_weights(learner.model).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("dtype", "distributed"), [("float32", False), ("bfloat16", False), ("float32", True), ("bfloat16", True)]
)
@pytest.mark.parametrize(("first", "second"), [(build_plain, build_model), (build_model, build_plain)])
def test_weights_and_optimizer_states_move_between_megatron_s_experts_and_stacked_ones(
    tmp_path: Path, checkpoints: dict[str, Path], dtype: str, distributed: bool, first: Build, second: Build
) -> None:
    checkpoint = checkpoints["glm4.5"]
    writer = learner(first, checkpoint, dtype, distributed=distributed)
    step(writer, 1)
    dist_checkpointing.save(sharded_state(writer, None, CheckpointMemory(), with_optimizer=True), str(tmp_path))
    reader = learner(second, checkpoint, dtype, distributed=distributed)
    assert not same(weights(reader), weights(writer))
    load_state(reader, None, tmp_path, everything=True, with_optimizer=True)
    assert same(weights(reader), weights(writer))
    norms = [step(each, 2) for each in (writer, reader)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for one, other in zip(weights(writer).values(), weights(reader).values(), strict=True):
        # The moments decide this step: a fresh Adam's differs by the learning rate of 1e-3.
        assert (one - other).abs().max() <= (1e-6 if dtype == "float32" else 0.0) + 2e-7


def test_checkpoints_of_both_have_the_same_entries(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    found = []
    for build in (build_plain, build_model):
        writer = learner(build, checkpoints["qwen3-moe"], "bfloat16", distributed=False)
        step(writer, 1)
        state = sharded_state(writer, None, CheckpointMemory(), with_optimizer=True)
        apply_factories(state)
        found.append({each.key: each.global_shape for each in nested_values(state) if isinstance(each, ShardedTensor)})
    assert found[0] == found[1]
    assert any(name.startswith("optimizer") and "experts" in name for name in found[0])
