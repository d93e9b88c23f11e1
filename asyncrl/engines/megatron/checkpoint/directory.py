"""The folders of checkpoints, named as Megatron does.  Imports neither torch nor Megatron: the driver reads them first.

DIR/latest_checkpointed_iteration.txt     the number of the latest complete checkpoint; written last
DIR/iter_0000010/                         the checkpoint after 10 training steps
    .metadata, metadata.json, *.distcp    weights and optimizer, in Megatron's torch_dist format
    run.json                              the model's shape, and the state of the run
DIR/iter_0000015.partial/                 being written, or left by a run that ended before it was complete
"""

import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from asyncrl.config.areas import CheckpointConfig
from asyncrl.engines.megatron.checkpoint.checksums import check_files
from asyncrl.errors import CheckpointFailed, ConfigError, unusable
from asyncrl.models.shape import ModelShape

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Megatron's converters write this in place of a number: the checkpoint has weights alone, of no training step."""
RUN_FILE = "run.json"
PARTIAL = ".partial"
_NAME = re.compile(r"iter_(\d{7,})")
SCHEMA = 1
"""The version of ``run.json``; files without one have 0.  A new field needs a default, by which old files load.  Raise
the version if earlier versions of asyncrl, which ignore new fields, must not resume from the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The source of a trainer's first weights, if it is not ``--hf-checkpoint``."""

    folder: Path
    kind: Literal["resume", "weights", "hugging_face"]
    """The content that is read: everything in a torch_dist checkpoint, its weights alone, or the weights in a Hugging
    Face folder."""
    optimizer: bool = False
    """Whether the optimizer's state is read as well."""


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint after ``step`` training steps."""
    return root / f"iter_{step:07}"


def latest(root: Path) -> Path | None:
    """Return the folder of the latest complete checkpoint in ``root``; None if there is none.  Raises ConfigError."""
    tracker = root / TRACKER
    try:
        text = tracker.read_text().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unusable(f"{tracker}: cannot be read: {error}", error) from error
    except ValueError as error:
        raise ConfigError(f"{tracker}: cannot be read: {error}") from error
    if text != RELEASE and not text.isdecimal():
        raise ConfigError(f"{tracker}: contains {text[:40]!r}, neither the number of a checkpoint nor {RELEASE!r}")
    folder = root / RELEASE if text == RELEASE else folder_of(root, int(text))
    # A checkpoint that is being replaced has another name for a moment, and a run may be killed in that moment.
    for candidate in (folder, outdated_of(folder)):
        if is_complete(candidate):
            return candidate
    raise ConfigError(f"{tracker}: names {folder.name}, which is not there or not complete")


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` is a complete torch_dist checkpoint: its metadata is written after all its tensors."""
    description = (folder / "metadata.json", folder / ".metadata")
    return all(path.is_file() and path.stat().st_size > 0 for path in description)


def complete_steps(root: Path) -> list[int]:
    """Return the steps of the complete checkpoints in ``root``, in order.  Partial and deleted ones do not count."""
    named = ((_NAME.fullmatch(path.name), path) for path in root.glob("iter_*"))
    return sorted(int(name[1]) for name, path in named if name is not None and is_complete(path))


def is_hugging_face(folder: Path) -> bool:
    """Whether ``folder`` has a model in Hugging Face format."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def find_origin(checkpoint: CheckpointConfig, ref_load: Path | None) -> Origin | None:
    """Return the source of the first weights; None means ``--hf-checkpoint``.  Raises ConfigError."""
    root = checkpoint.load
    if root is not None:
        folder = latest(root) if checkpoint.ckpt_step is None else _asked_for(root, checkpoint.ckpt_step)
        if folder is not None and folder.name != RELEASE:
            _check_files(folder, root, "load")
            return Origin(folder=folder, kind="resume", optimizer=checkpoint.load_optim)
        if folder is not None or is_hugging_face(root):
            return _weights(root, "load")
        if is_complete(root):  # otherwise the run would start anew, as it does with an empty folder
            raise ConfigError(f"load {root} is a single checkpoint; give {_folder_and_step(root)}")
    return None if ref_load is None else _weights(ref_load, "ref-load")


def _folder_and_step(checkpoint: Path) -> str:
    """Return the flags that name a single checkpoint."""
    name = _NAME.fullmatch(checkpoint.name)
    if name is None:
        return f"the folder that has it, or ref-load {checkpoint} for its weights alone"
    return f"load {checkpoint.parent} and ckpt-step {int(name[1])}"


def lacks_weights(root: Path) -> bool:
    """Whether ``root`` is the folder of a model whose weights are not there yet, as a dry run accepts it."""
    has_any = is_hugging_face(root) or is_complete(root) or (root / TRACKER).exists()
    return (root / "config.json").is_file() and not has_any


def _check_files(folder: Path, root: Path, setting: str) -> None:
    """Raise ConfigError, which names an earlier checkpoint, if a file of the checkpoint is torn or missing."""
    try:
        check_files(folder)
    except CheckpointFailed as error:
        before = [step for step in complete_steps(root) if folder_of(root, step).name < folder.name]
        hint = ""
        if before:
            name = f"that of --ckpt-step {before[-1]}" if setting == "load" else folder_of(root, before[-1])
            hint = f"; the checkpoint before is {name}"
        raise ConfigError(f"{setting}: {error}{hint}") from error


def _asked_for(root: Path, step: int) -> Path:
    folder = folder_of(root, step)
    if not is_complete(folder):
        raise ConfigError(f"ckpt-step {step}: {folder} is not there or not complete")
    return folder


def _weights(root: Path, setting: str) -> Origin:
    """Return the weights in a folder of either format.  Raises ConfigError, which names ``setting``."""
    if is_hugging_face(root):
        return Origin(folder=root, kind="hugging_face")
    try:
        folder = find_weights(root)
    except ConfigError as error:
        raise ConfigError(f"{setting} {error}") from error
    _check_files(folder, folder.parent, setting)
    return Origin(folder=folder, kind="weights")


def find_weights(root: Path) -> Path:
    """Return ``root`` if it is a torch_dist checkpoint, else the latest checkpoint in it.  Raises ConfigError."""
    folder = root if is_complete(root) else latest(root)
    if folder is None:
        raise ConfigError(f"{root} has neither a checkpoint nor a model in Hugging Face format")
    return folder


def check_save(checkpoint: CheckpointConfig) -> None:
    """Raise ConfigError if checkpoints cannot be written, or would mix with the checkpoints of another run."""
    save = checkpoint.save
    if save is None:
        return
    goes_on = checkpoint.load is not None and checkpoint.load.resolve() == save.resolve()
    if not goes_on and (save / TRACKER).exists():
        raise ConfigError(f"save {save} has checkpoints of another run: resume with --load {save}, or save elsewhere")
    _check_writable(save)


def _check_writable(save: Path) -> None:
    """Raise ConfigError or NotNow if ``save`` is not writable, before hours of training are lost."""
    try:
        save.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=save):
            pass
    except OSError as error:
        raise unusable(f"save {save}: cannot be written to: {error.strerror}", error) from error


def notes_of(shape: ModelShape, run: Mapping[str, Any]) -> bytes:
    """Return the contents of a checkpoint's ``run.json``: the model's shape, and the state of the run."""
    return orjson.dumps({"schema": SCHEMA, "model": asdict(shape), "run": dict(run)})


def as_written(shape: ModelShape) -> dict[str, Any]:
    """Return ``shape`` as ``run.json`` has it, with lists for tuples."""
    found: dict[str, Any] = orjson.loads(orjson.dumps(asdict(shape)))
    return found


def read_notes(folder: Path) -> dict[str, Any] | None:
    """Read the ``run.json`` of a checkpoint; None if another program wrote the checkpoint.  Raises ConfigError."""
    path = folder / RUN_FILE
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict) or not {"model", "run"} <= found.keys():
        raise ConfigError(f"{path}: has no model or no run")
    schema = found.get("schema", 0)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise ConfigError(
            f"{path}: a later version of asyncrl wrote it (schema {schema}, here {SCHEMA}); update asyncrl"
        )
    return found


def check_model(folder: Path, model: Mapping[str, Any], shape: ModelShape) -> None:
    """Raise ConfigError unless the checkpoint's model and ``shape`` have the same tensors."""
    differences = [
        f"{name} {model[name]} (here {value})"
        for name, value in as_written(shape).items()
        if name in model and model[name] != value and name not in _NOT_IN_TENSORS
    ]
    if differences:
        raise ConfigError(f"{folder} is of another model than hf-checkpoint: {', '.join(differences)}")


_NOT_IN_TENSORS = frozenset({"dtype", "fp8_block", "max_positions", "num_next_token_layers"})
"""Fields of the shape in which the checkpoint may differ: the Hugging Face folder's precision, the maximum position,
and layers that are not trained."""


def outdated_of(folder: Path) -> Path:
    """Return the name that a checkpoint has while another one replaces it."""
    return folder.with_name(f"{folder.name}.outdated")
