"""A complete run on empty files, for tests that change one thing in it."""

from pathlib import Path

import pytest

from asyncrl.config import RunConfig, load_run, missing_files
from asyncrl.config.problems import contradictions
from asyncrl.errors import ConfigError


def complete(folder: Path) -> list[str]:
    """Flags of a run without problems."""
    checkpoint = folder / "tiny-model"
    checkpoint.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (checkpoint / name).touch()
    (folder / "train.jsonl").touch()
    flags = "--num-rollout 3 --rollout-batch-size 8 --n-samples-per-prompt 4 --label-key label --rm-type exact"
    return [*flags.split(), "--hf-checkpoint", str(checkpoint), "--prompt-data", str(folder / "train.jsonl")]


def load(folder: Path, *more: str) -> RunConfig:
    return load_run([*complete(folder), *more])


def problems(run: RunConfig) -> list[str]:
    """The lines of problems, with their numbers; empty if the run can start."""
    return [*missing_files(run), *contradictions(run)]


def complaints(*argv: str) -> list[str]:
    """The lines of the ConfigError that these flags raise."""
    with pytest.raises(ConfigError) as error:
        load_run(argv)
    return str(error.value).split("\n")
