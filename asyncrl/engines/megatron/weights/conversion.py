"""Conversion between a Hugging Face folder and a torch_dist checkpoint, one weight at a time.

A round trip changes no bit.  Every process calls the same function, and each converts a share of the weights.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor

from asyncrl.config import ShapeConfig
from asyncrl.engines.megatron.checkpoint.directory import (
    RELEASE,
    TRACKER,
    check_model,
    find_weights,
    is_complete,
    notes_of,
    read_notes,
)
from asyncrl.engines.megatron.checkpoint.dist_files import DistReader, DistWriter, Written, finish
from asyncrl.engines.megatron.checkpoint.hf_files import (
    Shard,
    begin_checkpoint,
    dtypes_of,
    finish_checkpoint,
    partial_of,
    reader,
    write_shards,
)
from asyncrl.engines.megatron.checkpoint.progress import Watch, watched
from asyncrl.engines.megatron.checkpoint.writes import write_release
from asyncrl.engines.megatron.weights.hf_weights import from_hf, saved_changes
from asyncrl.engines.megatron.weights.hf_weights import to_hf as tensors_of
from asyncrl.engines.megatron.weights.meta_model import Placed, placed_weights, share
from asyncrl.errors import CheckpointFailed, ConfigError
from asyncrl.models.overrides import overridden
from asyncrl.models.shape import ModelShape, read_shape

PER_WORD = frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})
"""Weights with one row for each entry of the vocabulary."""

logger = logging.getLogger(__name__)


def to_torch_dist(source: Path, target: Path, vocab_size: int | None = None, flags: ShapeConfig | None = None) -> None:
    """Write the weights of the Hugging Face folder ``source`` to ``target/release``.  Collective.

    With ``vocab_size``, rows of zeros pad embeddings and output layer to that size.  ``flags`` are the shape flags that
    the run will have.  Raises ConfigError or CheckpointFailed.
    """
    shape, folder = overridden(read_shape(source), flags or ShapeConfig()), target / RELEASE
    if (target / TRACKER).exists() or is_complete(folder):
        raise ConfigError(f"{target} has checkpoints already: convert to an empty folder")
    if vocab_size is not None and vocab_size < shape.vocab_size:
        raise ConfigError(
            f"vocab-size {vocab_size}: {source} has a vocabulary of {shape.vocab_size} tokens; it cannot be truncated"
        )
    if shape.num_next_token_layers:
        logger.warning("%s: its layers for multi-token prediction are left out", source)
    weights, others = placed_weights(_with_words(shape, vocab_size))
    try:
        _make_room(folder)
        with _watched("to torch_dist", mine := _mine(weights)) as watch:
            written = _write_parts(mine, others if dist.get_rank() == 0 else [], folder, (source, shape), watch)
        everyone = _gathered(written)
        if dist.get_rank() == 0:
            finish(folder, everyone)
            write_release(folder, notes_of(shape, {}))
    except OSError as error:
        raise CheckpointFailed(f"{folder} cannot be written: {error}") from error
    dist.barrier()


def to_hf(source: Path, target: Path, original: Path, vocab_size: int | None = None) -> None:
    """Write the weights of the newest checkpoint in ``source`` as the Hugging Face folder ``target``.  Collective.

    ``original`` is the Hugging Face folder that training started from.  Its config, tokenizer and dtypes are used,
    except where the run's flags overrode the config.  The first ``vocab_size`` rows of embeddings and output layer are
    kept; the default is config.json's vocabulary size.  Raises ConfigError or CheckpointFailed.
    """
    folder = find_weights(source)
    _check_target(target, folder)
    trained = _trained_shape(folder, original)
    shape = _with_words(trained, vocab_size)
    weights, _ = placed_weights(shape)
    stored = DistReader(folder)
    _check_sizes(weights, stored, folder)
    altered = saved_changes(original, trained)
    if shape.vocab_size != trained.vocab_size:
        altered["vocab_size"] = shape.vocab_size
    try:
        if dist.get_rank() == 0:
            begin_checkpoint(original, target, altered)
        dist.barrier()
        everyone = _gathered(_write_tensors(_mine(weights), stored, partial_of(target), (original, shape)))
        if dist.get_rank() == 0:
            finish_checkpoint(everyone, target)
    except OSError as error:
        raise CheckpointFailed(f"{target} cannot be written: {error}") from error
    dist.barrier()


def _check_target(target: Path, checkpoint: Path) -> None:
    """Raise ConfigError if ``target``, which will be deleted and made anew, has more than a model."""
    is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    if not is_free and not (target / "config.json").is_file():
        raise ConfigError(f"{target} is not a model that may be replaced: give another folder")
    if checkpoint.resolve().is_relative_to(target.resolve()):
        raise ConfigError(f"{target} contains {checkpoint}, which is to be converted: give another folder")


def _make_room(folder: Path) -> None:
    """Create an empty folder for all processes, without the files that a killed conversion left."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("*.distcp"):
            left.unlink()
    dist.barrier()


def _write_parts(
    weights: Sequence[Placed],
    others: Sequence[ShardedObject],
    folder: Path,
    source: tuple[Path, ModelShape],
    watch: Watch,
) -> list[Written]:
    checkpoint, shape = source
    with ExitStack() as files:
        read = reader(checkpoint, files, shape.fp8_block)
        writer = files.enter_context(DistWriter(folder, dist.get_rank(), watch.wrote))
        for weight in weights:
            numbers = _fitted(from_hf(weight.name, read, shape), weight, checkpoint)
            for part in weight.parts(numbers):
                writer.add(part)
            watch.moved(weight.whole.nbytes)
        for each in others:
            writer.add_object(each)
        writer.close()
    return writer.written


def _write_tensors(
    weights: Sequence[Placed], stored: DistReader, partial: Path, original: tuple[Path, ModelShape]
) -> list[Shard]:
    with _watched("to Hugging Face", weights) as watch:
        return write_shards(
            _read_tensors(weights, stored, original, watch),
            partial,
            writer=dist.get_rank(),
            on_shard=lambda shard: watch.wrote(shard.path, shard.num_bytes),
        )


def _read_tensors(
    weights: Sequence[Placed], stored: DistReader, original: tuple[Path, ModelShape], watch: Watch
) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors of ``weights``, in the dtypes of ``original``."""
    checkpoint, shape = original
    dtypes, default = dtypes_of(checkpoint), getattr(torch, shape.dtype)
    for weight in weights:
        for name, tensor in tensors_of(weight.name, weight.joined(stored.read), shape):
            yield name, tensor.to(dtypes.get(name, default))
        watch.moved(weight.whole.nbytes)


def _fitted(numbers: Tensor, weight: Placed, checkpoint: Path) -> Tensor:
    """Return ``numbers`` in the dtype of ``weight``, padded to its rows.  Raises ConfigError if the shapes differ."""
    missing = weight.whole.shape[0] - numbers.shape[0]
    if weight.name in PER_WORD and missing > 0:
        numbers = F.pad(numbers, (0, 0, 0, missing))
    if numbers.shape != weight.whole.shape:
        raise ConfigError(
            f"hf-checkpoint: the tensors of {weight.name} in {checkpoint} have the shape {list(numbers.shape)} "
            f"together, config.json requires {list(weight.whole.shape)}"
        )
    return numbers.to(weight.whole.dtype)


def _check_sizes(weights: Sequence[Placed], stored: DistReader, folder: Path) -> None:
    """Raise ConfigError unless the checkpoint has exactly these weights, in these sizes.

    The checkpoint's vocabulary may be larger.
    """
    parts = [part for weight in weights for part in weight.parts(weight.whole)]
    per_word = {part.key for weight in weights if weight.name in PER_WORD for part in weight.parts(weight.whole)}
    for part in parts:
        found, asked = stored.size(part), torch.Size(part.global_shape)
        if part.key in per_word and found[0] < asked[0]:
            raise ConfigError(f"vocab-size {asked[0]}: {part.key} in {folder} has only {found[0]} rows")
        if found[part.key in per_word :] != asked[part.key in per_word :]:
            raise ConfigError(f"{part.key} in {folder} has shape {list(found)}, hf-checkpoint requires {list(asked)}")
    if unread := stored.unread(parts):
        raise ConfigError(f"{folder} has weights that hf-checkpoint lacks: {', '.join(unread[:3])}, ...")


def _trained_shape(folder: Path, original: Path) -> ModelShape:
    """Return the shape of the checkpoint ``folder``.  Raises ConfigError if ``original`` is another model."""
    shape, notes = read_shape(original), read_notes(folder)
    if notes is None:
        return shape
    shape = _as_trained(shape, notes["model"])
    check_model(folder, notes["model"], shape)
    return shape


def _as_trained(shape: ModelShape, model: Mapping[str, Any]) -> ModelShape:
    """Return ``shape`` with the values that a run's flags may have changed, see ``overrides``.

    ``model`` is the model in the checkpoint's ``run.json``.
    """
    rope = model.get("rope", {})
    return replace(
        shape,
        norm_eps=model.get("norm_eps", shape.norm_eps),
        max_positions=model.get("max_positions", shape.max_positions),
        rope=replace(
            shape.rope,
            theta=rope.get("theta", shape.rope.theta),
            fraction=rope.get("fraction", shape.rope.fraction),
        ),
    )


def _with_words(shape: ModelShape, vocab_size: int | None) -> ModelShape:
    return shape if vocab_size is None else replace(shape, vocab_size=vocab_size)


def _mine(weights: Sequence[Placed]) -> list[Placed]:
    return share(weights, dist.get_rank(), dist.get_world_size())


@contextmanager
def _watched(what: str, weights: Sequence[Placed]) -> Iterator[Watch]:
    total = sum(weight.whole.nbytes for weight in weights)
    with watched(what, total, is_first=dist.get_rank() == 0) as watch:
        yield watch


def _gathered[T](mine: list[T]) -> list[T]:
    """Gather the items of all processes on rank 0, in the order of ranks; other ranks get an empty list."""
    found: list[list[T] | None] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, found)
    return list(chain.from_iterable(each or [] for each in found or []))
