"""Weights between a Hugging Face checkpoint and a Megatron model.  One table says what becomes of each tensor.

Written for whole tensors: one rank holds all of a model.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.engines.buckets import WeightBucket
from asyncrl.engines.megatron.shape import ModelShape
from asyncrl.errors import ConfigError

SHARD_BYTES = 4 * 1024**3
"""Of one file of a saved checkpoint, like transformers' default."""
BESIDE_THE_WEIGHTS = ("config.json", "generation_config.json", "*token*", "vocab*", "merges*", "*.model", "*.jinja")
"""Files that a saved checkpoint takes from the one it started from."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter of Megatron's and the tensors that it is made of."""

    megatron: str
    """Name, with ``{layer}`` and ``{expert}`` for its numbers."""
    hf: tuple[str, ...]
    layout: Literal["stacked", "heads"] = "stacked"
    """``stacked``: one under the other; ``heads``: queries, keys and values, interleaved by query group."""


_LAYER, _HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."
_EXPERT, _HF_EXPERT = _LAYER + "mlp.experts.local_experts.{expert}.", _HF_LAYER + "mlp.experts.{expert}."

RULES = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Rule(_LAYER + "input_layernorm.weight", (_HF_LAYER + "input_layernorm.weight",)),
    Rule(
        _LAYER + "self_attention.linear_qkv.weight",
        tuple(f"{_HF_LAYER}self_attn.{part}_proj.weight" for part in "qkv"),
        "heads",
    ),
    Rule(_LAYER + "self_attention.q_layernorm.weight", (_HF_LAYER + "self_attn.q_norm.weight",)),
    Rule(_LAYER + "self_attention.k_layernorm.weight", (_HF_LAYER + "self_attn.k_norm.weight",)),
    Rule(_LAYER + "self_attention.linear_proj.weight", (_HF_LAYER + "self_attn.o_proj.weight",)),
    Rule(_LAYER + "pre_mlp_layernorm.weight", (_HF_LAYER + "post_attention_layernorm.weight",)),
    Rule(_LAYER + "mlp.linear_fc1.weight", (_HF_LAYER + "mlp.gate_proj.weight", _HF_LAYER + "mlp.up_proj.weight")),
    Rule(_LAYER + "mlp.linear_fc2.weight", (_HF_LAYER + "mlp.down_proj.weight",)),
    Rule(_LAYER + "mlp.router.weight", (_HF_LAYER + "mlp.gate.weight",)),
    Rule(_EXPERT + "linear_fc1.weight", (_HF_EXPERT + "gate_proj.weight", _HF_EXPERT + "up_proj.weight")),
    Rule(_EXPERT + "linear_fc2.weight", (_HF_EXPERT + "down_proj.weight",)),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",)),
)
_RULES = {rule.megatron: rule for rule in RULES}
_NUMBERS = (("layer", re.compile(r"(?<=decoder\.layers\.)\d+")), ("expert", re.compile(r"(?<=local_experts\.)\d+")))


@torch.no_grad()
def load_hf(model: GPTModel, shape: ModelShape, checkpoint: Path) -> None:
    """Fill every parameter of ``model`` from the safetensors in ``checkpoint``.  Raises ConfigError."""
    with ExitStack() as files:
        read = _reader(checkpoint, files)
        for name, parameter in model.named_parameters():
            hf_names, layout = _named(name)
            tensor = _joined([read(hf_name) for hf_name in hf_names], layout, shape)
            if tensor.shape != parameter.shape:
                raise ConfigError(
                    f"hf-checkpoint: {', '.join(hf_names)} make {tuple(tensor.shape)}, "
                    f"config.json asks for {tuple(parameter.shape)}"
                )
            parameter.copy_(tensor)


@torch.no_grad()
def export_hf(model: GPTModel, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint by name, in a fixed order; float32 where the optimizer keeps a finer copy."""
    for name, parameter in model.named_parameters():
        yield from to_hf(name, getattr(parameter, "main_param", parameter), shape)


def to_hf(name: str, tensor: Tensor, shape: ModelShape) -> list[tuple[str, Tensor]]:
    """The checkpoint's tensors that Megatron's parameter ``name`` is made of; views where they can be."""
    hf_names, layout = _named(name)
    if layout == "stacked":
        parts = tensor.detach().chunk(len(hf_names))
    else:
        per_group = shape.num_heads // shape.num_query_groups
        sizes = [per_group * shape.head_dim, shape.head_dim, shape.head_dim]
        grouped = tensor.detach().reshape(shape.num_query_groups, sum(sizes), -1)
        parts = tuple(part.flatten(0, 1) for part in torch.split(grouped, sizes, dim=1))
    return list(zip(hf_names, parts, strict=True))


def plan_buckets(
    model: GPTModel, shape: ModelShape, max_bytes: int
) -> tuple[tuple[WeightBucket, ...], tuple[tuple[str, ...], ...]]:
    """What each bucket will hold, and the names of Megatron's parameters that it is made from.

    Parameters keep the model's order.  One that is larger than ``max_bytes`` has a bucket of its own.
    """
    plan: list[list[str]] = []
    free = 0
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    for name, num_bytes in sizes.items():
        if not plan or num_bytes > free:
            plan.append([])
            free = max_bytes
        plan[-1].append(name)
        free -= num_bytes
    return tuple(_bucket(model, shape, names) for names in plan), tuple(map(tuple, plan))


def save_hf(model: GPTModel, shape: ModelShape, source: Path, target: Path) -> None:
    """Write a checkpoint that transformers loads, in the dtype of the one in ``source``.

    ``target`` appears, or changes, when it is complete: everything is written beside it and renamed.
    """
    target = target.absolute()
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for pattern in BESIDE_THE_WEIGHTS:
        for path in source.glob(pattern):
            shutil.copyfile(path, partial / path.name)
    _write_shards(export_hf(model, shape), getattr(torch, shape.dtype), partial)
    if target.exists():
        outdated = target.with_name(target.name + ".outdated")
        shutil.rmtree(outdated, ignore_errors=True)
        target.rename(outdated)
        partial.rename(target)
        shutil.rmtree(outdated)
    else:
        partial.rename(target)


def _named(name: str) -> tuple[tuple[str, ...], str]:
    """The checkpoint's names for Megatron's parameter ``name``, and how its tensors lie in it."""
    numbers = {}
    for what, pattern in _NUMBERS:
        if found := pattern.search(name):
            numbers[what] = found[0]
            name = pattern.sub(f"{{{what}}}", name)
    rule = _RULES[name]
    return tuple(hf_name.format(**numbers) for hf_name in rule.hf), rule.layout


def _joined(parts: list[Tensor], layout: str, shape: ModelShape) -> Tensor:
    if layout == "stacked":
        return torch.cat(parts)
    groups = [part.reshape(shape.num_query_groups, -1, part.shape[-1]) for part in parts]
    return torch.cat(groups, dim=1).flatten(0, 1)


def _reader(checkpoint: Path, files: ExitStack) -> Callable[[str], Tensor]:
    """Reads one tensor at a time; the files close with ``files``."""
    paths = sorted(checkpoint.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"hf-checkpoint: no safetensors in {checkpoint}")
    opened = [files.enter_context(safe_open(path, framework="pt")) for path in paths]
    holder = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def read(name: str) -> Tensor:
        if name not in holder:
            raise ConfigError(f"hf-checkpoint: no tensor {name} in {checkpoint}")
        tensor: Tensor = holder[name].get_tensor(name)
        return tensor

    return read


def _bucket(model: GPTModel, shape: ModelShape, names: list[str]) -> WeightBucket:
    tensors = [pair for name in names for pair in to_hf(name, model.get_parameter(name), shape)]
    return WeightBucket(
        names=tuple(name for name, _ in tensors),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors),
        shapes=tuple(tuple(tensor.shape) for _, tensor in tensors),
        num_bytes=sum(tensor.nbytes for _, tensor in tensors),
    )


def _write_shards(tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype, folder: Path) -> None:
    """One file when everything fits, else numbered files and the index that transformers looks for."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(held, folder / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        held[name] = tensor.to("cpu", dtype).contiguous().clone()
        total += held[name].nbytes
        if sum(kept.nbytes for kept in held.values()) >= SHARD_BYTES:
            flush()
    if held:
        flush()
    _name_shards(shards, total, folder)


def _name_shards(shards: list[list[str]], total_bytes: int, folder: Path) -> None:
    if len(shards) == 1:
        (folder / "shard-0.safetensors").rename(folder / "model.safetensors")
        return
    files = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"shard-{number}.safetensors").rename(folder / file)
        files.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
