"""Every fenced block of the documentation is run, or checked as the program that reads it would, or has a reason."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from asyncrl.config import load_run
from asyncrl.config.eval_file import read_eval_file
from asyncrl.config.toml_file import read_toml
from asyncrl.errors import ConfigError
from tests.unit.website.blocks import ROOT, Block, all_blocks, blocks_of, user_files
from tests.unit.website.commands import commands, problems_of
from tests.unit.website.names import unknown_imports

BLOCKS = all_blocks()
FILES = user_files(BLOCKS)
PAGES = sorted({block.page for block in BLOCKS})

CHECKED_ELSEWHERE = {
    ("docs/doctor.md", 'SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"'): (
        "a script of slime, which tests/unit/doctor/test_page.py translates"
    ),
    ("docs/doctor.md", "from slime.agent.adapters import post"): "a reward of slime with an import that is missing",
}
"""Blocks that no check here understands, by page and first line, with the reason."""
PARTS = {
    ("docs/algorithms.md", "def grpo(samples):"): "names of asyncrl.algorithms.advantages",
    ("docs/guides/tools.md", "episode = environment_program(Guess, turn_rewards=True, max_new_tokens=256)"): (
        "continues the block before"
    ),
    ("docs/guides/tools.md", 'index = SearchIndex.of_file("corpus.jsonl")'): "the text before it names the module",
    ("docs/models.md", "LLAMA = Family("): "a part of a file of asyncrl",
}
"""Programs that are parts of files, so that names are undefined in them, with the reason."""
OUTPUT = ("", "text")
"""Languages of blocks that show what a program prints."""
COMMAND = re.compile(r"^(?:\$ |uv |pip |python3? |bash |asyncrl |train(?:_async)?\.py )", re.MULTILINE)


def key(block: Block) -> tuple[str, str]:
    return block.page, block.first_line


# ---- one check for each language


def shell_problems(block: Block, folder: Path) -> list[str]:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=90)
    return [done.stderr] if done.returncode else problems_of(block.text, FILES)


def python_problems(block: Block, folder: Path) -> list[str]:
    try:
        return [f"{name}: no such module or name" for name in unknown_imports(block.text, FILES)]
    except SyntaxError as error:
        return [f"line {error.lineno}: {error.msg}"]


def settings_problems(block: Block, folder: Path) -> list[str]:
    """Check TOML or YAML: settings of a run, or sets of held-out prompts."""
    path = folder / (block.file or f"block.{block.language}")
    path.write_text(block.text)
    try:
        if block.language == "yaml" or "[eval" in block.text:
            return [] if read_eval_file(path) else ["no sets"]
        if "hf-checkpoint" in block.text and "# save = ?" not in block.text:
            load_run(["--config", str(path), "--dry-run"])
        return read_toml(path).mistakes
    except ConfigError as error:
        return str(error).splitlines()


def json_problems(block: Block, folder: Path) -> list[str]:
    """Check one JSON value, or one on each line."""
    try:
        try:
            json.loads(block.text)
        except json.JSONDecodeError:
            for line in block.text.splitlines():
                json.loads(line)
    except json.JSONDecodeError as error:
        return [str(error)]
    return []


def output_problems(block: Block, folder: Path) -> list[str]:
    """Refuse a command in a block without a language, because nothing would check it."""
    return [f"looks like a command, so name its language: {found[0]}" for found in COMMAND.finditer(block.text)]


def refused(block: Block, folder: Path) -> list[str]:
    return ["no check for this language"]


CHECKS: Mapping[str, Callable[[Block, Path], list[str]]] = {
    "bash": shell_problems,
    "sh": shell_problems,
    "python": python_problems,
    "toml": settings_problems,
    "yaml": settings_problems,
    "json": json_problems,
    **dict.fromkeys(OUTPUT, output_problems),
}


def found(blocks: list[Block], folder: Path) -> list[str]:
    """Return one line for each problem of the blocks."""
    lines = []
    for block in blocks:
        if key(block) not in CHECKED_ELSEWHERE:
            check = CHECKS.get(block.language, refused)
            lines += [f"{block.page}:{block.line}: {line}" for line in check(block, folder)]
    return lines


# ---- the documentation


@pytest.mark.parametrize("page", PAGES)
def test_every_block_starts_or_loads_as_it_is_written(page: str, tmp_path: Path) -> None:
    assert found([block for block in BLOCKS if block.page == page], tmp_path) == []


def test_programs_have_no_undefined_names(tmp_path: Path) -> None:
    programs = [block for block in BLOCKS if block.language == "python" and key(block) not in PARTS]
    for number, block in enumerate(programs):
        (tmp_path / f"{block.page.replace('/', '-')}-{block.line}-{number}.py").write_text(block.text)
    flags = ("check", "--isolated", "--no-cache", "--select", "F", "--output-format", "concise")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *flags, str(tmp_path)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stdout


def test_every_reason_has_its_block() -> None:
    assert {*CHECKED_ELSEWHERE, *PARTS} <= {key(block) for block in BLOCKS}


def test_every_fence_is_found() -> None:
    fences = sum(len(re.findall(r"^ *```", (ROOT / page).read_text(), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * len(BLOCKS)


# ---- the checks themselves


@pytest.mark.parametrize(
    ("language", "text", "problem"),
    [
        (
            "bash",
            "uv run train_async.py --config configs/quickstart.toml --max-stalness 2",
            "unknown flag --max-stalness",
        ),
        ("bash", "uv run train.py --config configs/quickstart.toml --max-staleness 2", "max-staleness 2 with train.py"),
        ("bash", "cd x && python train_async.py --config configs/quickstart.toml --lr fast", "--lr"),
        ("bash", "uv run asyncrl train --config configs/quickstart.toml --epochs 2", "unknown flag --epochs"),
        ("bash", "A=1 bash configs/qwen3-5b.sh", "no such script"),
        ("bash", "bash configs/qwen3-4b.sh --dry-rum", "unknown flag --dry-rum"),
        ("bash", "sbatch --nodes 2 configs/launch/slurm.sh configs/x.sh", "no such script"),
        ("bash", "uv run asyncrl doctor run.sh --output x", "unrecognized arguments"),
        ("bash", "uv run asyncrl convert to-hf", "required"),
        ("bash", "uv run asyncrl trane", "no such command"),
        ("bash", "python -m benchmarks.simulte", "no such module"),
        ("bash", "python -m benchmarks.simulate --gpus 8 --split 3", "--split: no such flag"),
        ("bash", "uv sync --extra doctor", "not in pyproject.toml"),
        ("bash", "pip install uv==0.0.1", "pip install"),
        ("bash", "uv run hf upload x/y", "hf upload"),
        ("bash", "docker build --build-arg EXTRA=wandb .", "not in the Dockerfile"),
        ("bash", "uv run pytest tests/units", "no such file"),
        ("bash", "frobnicate", "no check for this program"),
        ("bash", "uv run python my_missing.py", "no such program"),
        ("bash", "if true", "syntax error"),
        ("sh", "--custom-rm-path my_reward.py:rewards", "no block prints it"),
        ("sh", "--dynamic-sampling-filter-path 'asyncrl.filters:Bounds(low=1)'", "no such name"),
        ("python", "from asyncrl.types import Promt", "no such module or name"),
        ("python", "import slime.utils.tpyes", "no such module or name"),
        ("python", "from my_reward import rewards", "no such module or name"),
        ("python", "import torhc", "no such module or name"),
        ("python", "def f(:", "line 1"),
        ("toml", "rollout-batchsize = 2", "unknown key rollout-batchsize"),
        ("toml", "a = ", "block.toml"),
        ("yaml", "eval:\n  datasets:\n    - {name: a, path: b, top_o: 1}", "top_o"),
        ("json", '{"a": 1,}', "double quotes"),
        ("", "uv run train_async.py", "looks like a command"),
        ("zsh", "ls", "no check for this language"),
    ],
)
def test_a_mistake_is_found(language: str, text: str, problem: str, tmp_path: Path) -> None:
    (block,) = blocks_of(f"# Page\n\n```{language}\n{text}\n```\n", "page.md")
    (line,) = found([block], tmp_path)
    assert problem in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1 B=2 uv run x --y 'a b' | head", [["uv", "run", "x", "--y", "a b"], ["head"]]),
        ("x a \\\n    b && y   # z", [["x", "a", "b"], ["y"]]),
        ("until x a\ndo\n    case $? in 2 | 3) break ;; esac\n    y 3\ndone", [["x", "a"], ["y", "3"]]),
    ],
)
def test_commands_are_split(text: str, expected: list[list[str]]) -> None:
    assert list(commands(text)) == expected
