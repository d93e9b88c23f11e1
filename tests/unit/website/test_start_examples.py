"""The programs and figures of *Start* are what a new user sees."""

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.app.dry_run import dry_run
from asyncrl.config import load_run
from asyncrl.errors import ConfigError
from tests.unit.website.blocks import ROOT, Block, blocks_of, user_files
from tests.unit.website.commands import commands

START = ROOT / "docs" / "start"
SHAPE = {
    **json.loads((ROOT / "tests" / "launch" / "models" / "qwen3-4b" / "config.json").read_text()),
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
"""The released config.json of Qwen3-1.7B, as far as it gives the shape."""


def blocks(name: str) -> list[Block]:
    return blocks_of((START / name).read_text(), f"docs/start/{name}")


def dry_runs(name: str) -> dict[str, list[str]]:
    """Return the flags of each dry run of a page, by the command."""
    found = [words for block in blocks(name) if block.language == "bash" for words in commands(block.text)]
    return {shlex.join(words): words[3:] for words in found if "train_async.py" in words and "--dry-run" in words}


def said(flags: list[str]) -> str:
    """Return what a dry run prints."""
    console = Console(file=io.StringIO(), width=160)
    dry_run(load_run(flags), console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def run(folder: Path, program: str) -> str:
    done = subprocess.run([sys.executable, program], cwd=folder, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with everything that a user of *Start* has: configs, own files, and the shape of Qwen3-1.7B."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in ("data.md", "reward.md", "gpus.md"):
        for file, text in user_files(blocks(name)).items():
            (tmp_path / file).write_text(text)
    model = tmp_path / "models" / "Qwen3-1.7B"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(SHAPE))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_program_of_your_data_writes_files_that_a_run_reads(folder: Path) -> None:
    run(folder, "make_problems.py")
    flags = next(flags for command, flags in dry_runs("data.md").items() if "my_train.jsonl" in command)
    assert said(flags).endswith("the dry run found nothing wrong\n")
    with pytest.raises(ConfigError) as raised:
        said([*flags, "--input-key", "problem"])
    (line,) = re.findall(r"^error: (.*)$", (START / "data.md").read_text(), re.MULTILINE)
    assert line in str(raised.value)


def test_the_program_of_your_data_writes_problems_that_the_model_has_learned(folder: Path) -> None:
    run(folder, "make_problems.py")
    kinds = []
    for file in (ROOT / "configs" / "quickstart" / "train.jsonl", folder / "my_train.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        kinds.append({re.sub(r"[0-9]", "0", row.get("question", row.get("prompt"))) for row in rows})
    assert kinds == [{"000+0="}, {"000+0="}]


def test_the_program_of_your_reward_tries_it(folder: Path) -> None:
    assert "'right': 1.0" in run(folder, "try_my_reward.py")


def test_the_figures_of_your_gpus_are_those_of_the_dry_run(folder: Path) -> None:
    printed = {" ".join(line.split()) for line in said(["--config", "my_run.toml", "--dry-run"]).splitlines()}
    (shown,) = [block.text for block in blocks("gpus.md") if block.language == "text"]
    assert [line for line in shown.splitlines() if line and " ".join(line.split()) not in printed] == []


def test_other_gpus_fit_or_not_as_the_page_tells(folder: Path) -> None:
    small, four, shared = [flags for command, flags in dry_runs("gpus.md").items() if len(command.split()) > 6]
    with pytest.raises(ConfigError, match="a trainer rank needs"):
        said(small)
    assert "8: 4 trainer" in said(four)
    assert "shared GPU" in said(shared)
