"""The pages in docs/start: every flag and path on them exists, and each script finds what its page fetches."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from asyncrl.config.command_line import parser
from tests.unit.test_prose import FENCE

ROOT = Path(__file__).parents[2]
START = ROOT / "docs" / "start"
PAGES = sorted(path.name for path in START.glob("*.md"))
SCRIPTS = sorted(path.stem for path in (ROOT / "configs").glob("*.sh"))
DATA = {"TRAIN_DATA": "dapo-math-17k.jsonl", "EVAL_DATA": "aime-2024.jsonl"}
OURS = {flag for action in parser()._actions for flag in action.option_strings}  # noqa: SLF001
OTHERS = {
    "docker": {"--build-arg", "--gpus", "--ipc", "--network", "--rm", "--shm-size", "--ulimit", "--user"},
    "uv": {"--extra", "--no-dev"},
    "tensorboard": {"--logdir"},
}
"""Flags of other programs that the pages name, apart from those of hf."""
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
PASSED = ("--sglang-", "--router-")
SOURCES = "\n".join(path.read_text() for path in (ROOT / "asyncrl").rglob("*.py"))


def script(name: str) -> str:
    return (ROOT / "configs" / f"{name}.sh").read_text()


def default(name: str, variable: str) -> str:
    """Return the path that a script uses if ``variable`` is not set, relative to the working directory."""
    (found,) = set(re.findall(rf"\$\{{{variable}:-\$PWD/([^}}]*)\}}", script(name)))
    return str(found)


def commands(page: str) -> list[list[str]]:
    """Return the words of each command on a page."""
    blocks = re.findall(r"```bash\n(.*?)```", (START / page).read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def hf_flags() -> set[str]:
    code = "from huggingface_hub.cli.hf import main; main()"
    words = [sys.executable, "-c", code, "download", "--help"]
    return set(FLAG.findall(subprocess.run(words, capture_output=True, text=True, timeout=150).stdout))


def known(flag: str) -> bool:
    return flag in OURS or flag.startswith(PASSED)


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_in_the_text_exists(page: str) -> None:
    text = FENCE.sub("", (START / page).read_text())
    named = {flag for code in re.findall(r"`([^`\n]+)`", text) for flag in FLAG.findall(code)}
    others = set().union(*OTHERS.values())
    assert [flag for flag in sorted(named) if not known(flag) and flag not in others] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_of_our_commands_exists(page: str) -> None:
    ours = [words for words in commands(page) if any(re.search(r"train_async\.py$|configs/.*\.sh$", w) for w in words)]
    assert [flag for words in ours for flag in words if FLAG.fullmatch(flag) and not known(flag)] == []


def test_every_flag_of_hf_exists() -> None:
    used = {flag for page in PAGES for words in commands(page) if "hf" in words for flag in words if flag[:2] == "--"}
    assert used >= {"--local-dir", "--repo-type"}
    assert used <= hf_flags()


@pytest.mark.parametrize("page", PAGES)
def test_every_file_of_the_repository_exists(page: str) -> None:
    named = re.findall(r"(?<![\w/])(?:/opt/asyncrl/)?((?:configs/[\w./-]+|train_async)\.(?:sh|toml|py))", _text(page))
    assert [path for path in named if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_finds_what_its_page_fetches(name: str) -> None:
    fetched = [words for words in commands(f"{name}.md") if "hf" in words]
    folders = {words[words.index("--local-dir") + 1] for words in fetched if "dataset" not in words}
    files = {
        f"{words[words.index('--local-dir') + 1]}/{words[words.index('download') + 2]}"
        for words in fetched
        if "dataset" in words
    }
    assert folders == {default(name, "MODEL")}
    assert files == {default(name, variable) for variable in DATA} == {f"data/{file}" for file in DATA.values()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_names_the_paths_and_the_number_of_gpus_of_its_script(name: str) -> None:
    text = _text(f"{name}.md")
    for variable in ("MODEL", *DATA):
        assert f"| `{default(name, variable)}` | `{variable}` |" in text
    assert 'RUNS="${RUNS:-$PWD/runs}"' in script(name)
    assert f"`runs/{name}-checkpoints`" in text
    nodes, gpus = map(int, re.search(r"^launch (\d+) (\d+) ", script(name), re.MULTILINE).groups())  # type: ignore[union-attr]
    assert f"{nodes * gpus}: " in text
    assert ("NODE_RANK=1" in text) is (nodes > 1)
    overview = _text("index.md")
    assert re.search(rf"\[{re.escape(name)}\]\({re.escape(name)}\.md\) \|[^|]*\| {nodes * gpus} on ", overview)


def test_data_has_the_commands_of_the_scripts_pages() -> None:
    for name in SCRIPTS:
        assert [words for words in commands(f"{name}.md") if "dataset" in words] == [
            words for words in commands("data.md") if "hf" in words
        ]


def test_extras_and_the_version_of_uv_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pages = "\n".join(map(_text, PAGES))
    assert set(re.findall(r"--extra (\w+)", pages)) == set(project["optional-dependencies"])
    assert set(" ".join(re.findall(r'EXTRAS="([^"]*)"', pages)).split()) <= set(project["optional-dependencies"])
    uv = set(re.findall(r"uv==([\d.]+)", pages)) | set(re.findall(r"`UV_VERSION` \| `([\d.]+)`", pages))
    assert uv == set(re.findall(r"^ARG UV_VERSION=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))


def test_the_lines_of_a_run_are_those_of_the_program() -> None:
    said = _text("first-minutes.md")
    phases = re.findall(r"^\[\d:\d\d\] ([a-zA-Z ]+)", said, re.MULTILINE)
    assert len(phases) == 6
    failures = ["no such folder", "no such file", "a trainer rank needs", "ServerFailed", "Stalled", "who waits"]
    assert [line for line in failures if line not in said] == []
    assert [line for line in (*phases, *failures) if line not in SOURCES] == []


def _text(page: str) -> str:
    return (START / page).read_text()
