"""Where checkpoints lie, as Megatron names them.  Imports neither torch nor Megatron: the driver reads it first.

DIR/latest_checkpointed_iteration.txt     the number of the last complete one, written last
DIR/iter_0000010/                         after 10 training steps
    .metadata, metadata.json, *.distcp    weights and optimizer, in Megatron's torch_dist format
    run.json                              the model's shape, and where the run stood
DIR/iter_0000015.partial/                 being written, or left by a run that ended meanwhile
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from asyncrl.config.areas import CheckpointConfig
from asyncrl.errors import ConfigError
from asyncrl.models.shape import ModelShape

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""What Megatron's converters write in place of a number: weights alone, of no training step."""
RUN_FILE = "run.json"
PARTIAL = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a trainer's first weights come from, when not from ``--hf-checkpoint``."""

    folder: Path
    kind: Literal["resume", "weights", "hugging_face"]
    """A torch_dist checkpoint with everything in it; the weights of one; the weights of a Hugging Face folder."""
    optimizer: bool = False
    """Whether the optimizer's state is read, too."""


def folder_of(root: Path, step: int) -> Path:
    """Of the checkpoint after ``step`` training steps."""
    return root / f"iter_{step:07}"


def latest(root: Path) -> Path | None:
    """Folder of the newest complete checkpoint below ``root``; None when there is none.  Raises ConfigError."""
    tracker = root / TRACKER
    try:
        text = tracker.read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{tracker}: cannot be read: {error}") from error
    if text != RELEASE and not text.isdecimal():
        raise ConfigError(f"{tracker}: says {text[:40]!r}, not the number of a checkpoint")
    folder = root / RELEASE if text == RELEASE else folder_of(root, int(text))
    # One that is just being replaced has another name for a moment, in which a run may be killed.
    for candidate in (folder, _outdated(folder)):
        if is_complete(candidate):
            return candidate
    raise ConfigError(f"{tracker}: names {folder.name}, which is not there or not complete")


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` is a torch_dist checkpoint: its description is written after all its tensors."""
    description = (folder / "metadata.json", folder / ".metadata")
    return all(path.is_file() and path.stat().st_size > 0 for path in description)


def is_hugging_face(folder: Path) -> bool:
    """Whether ``folder`` has a model in Hugging Face format."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def find_origin(checkpoint: CheckpointConfig, ref_load: Path | None) -> Origin | None:
    """Where the first weights come from; None: from ``--hf-checkpoint``.  Raises ConfigError."""
    root = checkpoint.load
    if root is not None:
        folder = latest(root) if checkpoint.ckpt_step is None else _asked_for(root, checkpoint.ckpt_step)
        if folder is not None and folder.name != RELEASE:
            return Origin(folder=folder, kind="resume", optimizer=checkpoint.load_optim)
        if folder is not None or is_hugging_face(root):
            return _weights(root)
    return None if ref_load is None else _weights(ref_load)


def _asked_for(root: Path, step: int) -> Path:
    folder = folder_of(root, step)
    if not is_complete(folder):
        raise ConfigError(f"ckpt-step {step}: {folder} is not there or not complete")
    return folder


def _weights(root: Path) -> Origin:
    """The weights in a folder, whatever its format."""
    if is_hugging_face(root):
        return Origin(folder=root, kind="hugging_face")
    return Origin(folder=find_weights(root), kind="weights")


def find_weights(root: Path) -> Path:
    """The torch_dist checkpoint that ``root`` is, or the newest one in it.  Raises ConfigError."""
    folder = root if is_complete(root) else latest(root)
    if folder is None:
        raise ConfigError(f"{root} has neither a checkpoint nor a model in Hugging Face format")
    return folder


def check_save(checkpoint: CheckpointConfig) -> None:
    """Raise ConfigError if checkpoints cannot be written, or would come between those of another run."""
    save = checkpoint.save
    if save is None:
        return
    goes_on = checkpoint.load is not None and checkpoint.load.resolve() == save.resolve()
    if not goes_on and (save / TRACKER).exists():
        raise ConfigError(f"save {save} has checkpoints of another run: go on with --load {save}, or save elsewhere")
    _check_writable(save)


def _check_writable(save: Path) -> None:
    """Now, not after the first hours of training."""
    try:
        save.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=save):
            pass
    except OSError as error:
        raise ConfigError(f"save {save}: cannot be written to: {error.strerror}") from error


def notes_of(shape: ModelShape, run: Mapping[str, Any]) -> bytes:
    """What ``run.json`` of a checkpoint says: the model, and where the run stands."""
    return orjson.dumps({"model": asdict(shape), "run": dict(run)})


def as_written(shape: ModelShape) -> dict[str, Any]:
    """``shape`` as it is in a file: lists for tuples."""
    found: dict[str, Any] = orjson.loads(orjson.dumps(asdict(shape)))
    return found


def read_notes(folder: Path) -> dict[str, Any] | None:
    """The model and the run of a checkpoint; None for one that another program wrote.  Raises ConfigError."""
    path = folder / RUN_FILE
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict) or not {"model", "run"} <= found.keys():
        raise ConfigError(f"{path}: has no model or no run")
    return found


def check_model(folder: Path, model: Mapping[str, Any], shape: ModelShape) -> None:
    """Raise ConfigError unless the checkpoint's tensors are those of ``shape``."""
    differences = [
        f"{name} {model[name]} (here {value})"
        for name, value in as_written(shape).items()
        if name in model and model[name] != value and name not in _NOT_IN_TENSORS
    ]
    if differences:
        raise ConfigError(f"{folder} is of another model than hf-checkpoint: {', '.join(differences)}")


_NOT_IN_TENSORS = frozenset({"dtype", "fp8_block", "max_positions", "num_next_token_layers"})
"""Fields of the shape in which the checkpoint may differ: the Hugging Face folder's precision, what is not trained."""


def open_partial(folder: Path) -> Path:
    """An empty folder to write the checkpoint ``folder`` to; what ended runs left there goes."""
    for left in folder.parent.glob(f"iter_*{PARTIAL}"):
        shutil.rmtree(left)
    partial = folder.with_name(folder.name + PARTIAL)
    partial.mkdir(parents=True)
    return partial


def commit(folder: Path, notes: bytes) -> None:
    """Give the written partial folder its name, then name it as the latest.  Raises OSError."""
    partial = folder.with_name(folder.name + PARTIAL)
    _write(partial / RUN_FILE, notes)
    for path in (*partial.iterdir(), partial):  # Megatron and torch leave the end of some files to the system
        sync(path)
    outdated = _outdated(folder)
    if folder.exists():  # the run was resumed from an earlier one
        shutil.rmtree(outdated, ignore_errors=True)
        folder.rename(outdated)
    partial.rename(folder)
    sync(folder.parent)
    _name_latest(folder.parent, str(int(folder.name.removeprefix("iter_"))))
    shutil.rmtree(outdated, ignore_errors=True)


def _outdated(folder: Path) -> Path:
    """What a checkpoint is called while another takes its place."""
    return folder.with_name(f"{folder.name}.outdated")


def write_release(folder: Path, notes: bytes) -> None:
    """Name the written ``folder``, weights alone, as the latest.  Raises OSError."""
    _write(folder / RUN_FILE, notes)
    sync(folder)
    _name_latest(folder.parent, RELEASE)


def _name_latest(root: Path, name: str) -> None:
    tracker = root / TRACKER
    _write(tracker.with_name(tracker.name + PARTIAL), name.encode())
    tracker.with_name(tracker.name + PARTIAL).rename(tracker)
    sync(root)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Return when it is on the disk.  Raises OSError.

    Of a folder as well: a rename is on the disk only when its folder is."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
