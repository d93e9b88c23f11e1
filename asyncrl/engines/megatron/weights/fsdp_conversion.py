"""Conversion of an FSDP checkpoint (``torch.distributed.checkpoint``, DCP) to a Hugging Face folder.

The tensors of FSDP and of the Hugging Face folder have the same names, except for prefixes of wrappers.  About
``PART_BYTES`` of tensors are in memory at a time.  No process group is needed.
"""

import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from asyncrl.engines.megatron.checkpoint.hf_files import (
    begin_checkpoint,
    described,
    dtypes_of,
    finish_checkpoint,
    reader,
    write_shards,
)
from asyncrl.engines.megatron.checkpoint.progress import Watch, watched
from asyncrl.errors import CheckpointFailed, ConfigError
from asyncrl.models.shape import read_config

PREFIXES = ("", "model.", "module.", "model_state.model.", "model_state.", "state_dict.", "app.model.", "actor.")
"""Prefixes under which programs save a model's state; slime's FSDP trainer used ``model_state.model.``."""
WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of a name that FSDP 1, ``torch.compile`` and activation checkpointing insert."""
OTHER_STATE = ("optim", "lr_scheduler", "scheduler", "rng", "step", "extra_state")
"""Beginnings of the names of state that is not the model's."""
PART_BYTES = 1024**3
"""The approximate size of the tensors that are read at a time, in bytes."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One tensor of the checkpoint."""

    key: str
    """The name in the checkpoint."""
    size: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return self.size.numel() * self.dtype.itemsize


def fsdp_to_hf(
    source: Path, target: Path, original: Path, *, add_missing: bool = False, overwrite: bool = False
) -> None:
    """Write the model in the DCP checkpoint ``source`` as the Hugging Face folder ``target``.

    ``original`` is the Hugging Face folder that training started from.  Its config, tokenizer and dtypes are used.
    With ``add_missing``, tensors that the checkpoint lacks are copied from ``original``.  ``target`` must be empty
    unless ``overwrite``.  Raises ConfigError or CheckpointFailed.
    """
    folder = _checkpoint_folder(source)
    if target.exists() and not overwrite and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty: give another folder, or --force to replace it")
    config = read_config(original)
    if config.get("quantization_config"):
        raise ConfigError(f"{original} is quantized: give the folder of the weights that FSDP trained")
    wanted = described(original)
    found = _matched(_stored(folder), wanted, folder)
    missing = _check_names(found, wanted, config, folder, may_lack=add_missing)
    _check_sizes(found, wanted, folder)
    try:
        partial = begin_checkpoint(original, target, {})
        with watched("to Hugging Face", sum(each.num_bytes for each in found.values()), is_first=True) as watch:
            tensors = chain(_read(found, folder, dtypes_of(original), watch), _copied(missing, original))
            shards = write_shards(tensors, partial, on_shard=lambda shard: watch.wrote(shard.path, shard.num_bytes))
        finish_checkpoint(shards, target)
    except OSError as error:
        raise CheckpointFailed(f"{target} cannot be written: {error}") from error


def _checkpoint_folder(source: Path) -> Path:
    """Return ``source``, or its subfolder ``model``, whichever is a DCP checkpoint.  Raises ConfigError."""
    if (source / "common.pt").is_file():
        raise ConfigError(f"{source} has common.pt, so it is Megatron's torch_dist format: convert it with to-hf")
    for folder in (source, source / "model"):
        if (folder / ".metadata").is_file():
            return folder
    raise ConfigError(f"{source} has no .metadata, nor has {source / 'model'}: give the folder of one DCP checkpoint")


def _stored(folder: Path) -> list[Stored]:
    """Return the tensors of the checkpoint that may be the model's."""
    try:
        entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    except (OSError, pickle.UnpicklingError, AttributeError, EOFError) as error:
        raise ConfigError(f"{folder / '.metadata'} cannot be read: {error}") from error
    return [
        Stored(key=key, size=entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith(OTHER_STATE)
    ]


def _matched(stored: Sequence[Stored], wanted: Mapping[str, Any], folder: Path) -> dict[str, Stored]:
    """Return the tensors by their Hugging Face name: without wrappers, and without the prefix that fits best."""
    plain = {_unwrapped(each.key): each for each in stored}

    def under(prefix: str) -> dict[str, Stored]:
        return {name.removeprefix(prefix): each for name, each in plain.items() if name.startswith(prefix)}

    best = max((under(prefix) for prefix in PREFIXES), key=lambda found: len(found.keys() & wanted.keys()))
    if not best.keys() & wanted.keys():
        raise ConfigError(
            f"{folder} has no tensor of hf-checkpoint under any of the prefixes {', '.join(filter(None, PREFIXES))}; "
            f"it has {_some([each.key for each in stored]) or 'no tensors'}"
        )
    return best


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _check_names(
    found: dict[str, Stored], wanted: Mapping[str, Any], config: Mapping[str, Any], folder: Path, *, may_lack: bool
) -> list[str]:
    """Return the names that the checkpoint lacks.  Raises ConfigError if there are any, or additional ones.

    An output layer that is tied to the embedding is removed from ``found`` if the original does not store it.
    """
    if config.get("tie_word_embeddings") and "lm_head.weight" not in wanted:
        found.pop("lm_head.weight", None)
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if extra:
        raise ConfigError(f"{folder} has {len(extra)} tensors that hf-checkpoint lacks: {_some(extra)}")
    if missing and not may_lack:
        raise ConfigError(
            f"{folder} lacks {len(missing)} tensors of hf-checkpoint: {_some(missing)}; "
            "--add-missing-from-origin-hf copies them"
        )
    return missing


def _check_sizes(found: Mapping[str, Stored], wanted: Mapping[str, tuple[str, tuple[int, ...]]], folder: Path) -> None:
    """Raise ConfigError unless each tensor has the original's shape and holds floating-point numbers."""
    for name, each in found.items():
        _, shape = wanted[name]
        if tuple(each.size) != shape:
            raise ConfigError(f"{each.key} in {folder} has shape {list(each.size)}, hf-checkpoint has {list(shape)}")
        if not each.dtype.is_floating_point:
            raise ConfigError(f"{each.key} in {folder} has dtype {each.dtype}, only floating point can be converted")


def _read(
    found: Mapping[str, Stored], folder: Path, dtypes: Mapping[str, torch.dtype], watch: Watch
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in the dtypes of the original, about ``PART_BYTES`` at a time."""
    changed = {name for name, each in found.items() if each.dtype != dtypes.get(name, each.dtype)}
    if changed:
        kinds = sorted({f"{found[name].dtype} to {dtypes[name]}" for name in changed})
        logger.warning("%d tensors are converted from %s, as in hf-checkpoint", len(changed), ", ".join(kinds))
    for part in _parts(found):
        state: dict[str, Any] = {
            found[name].key: torch.empty(found[name].size, dtype=found[name].dtype) for name in part
        }
        try:
            load(state, storage_reader=FileSystemReader(folder), no_dist=True)
        except CheckpointException as error:  # a BaseException with the errors of all ranks
            cause = error.failures[0][0]
            raise CheckpointFailed(f"{folder} cannot be read: {cause}") from error
        for name in part:
            yield name, state.pop(found[name].key).to(dtypes.get(name, found[name].dtype))
            watch.moved(found[name].num_bytes)


def _parts(found: Mapping[str, Stored]) -> Iterator[list[str]]:
    part: list[str] = []
    num_bytes = 0
    for name, each in found.items():
        if part and num_bytes + each.num_bytes > PART_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(name)
        num_bytes += each.num_bytes
    if part:
        yield part


def _copied(names: Sequence[str], original: Path) -> Iterator[tuple[str, Tensor]]:
    if not names:
        return
    logger.warning("%d tensors are copied from %s: %s", len(names), original, _some(names))
    with ExitStack() as files:
        read = reader(original, files, None)
        for name in names:
            yield name, read(name)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
