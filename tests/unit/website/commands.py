"""Commands of the documentation, checked by the parsers of the programs that they start; nothing is started."""

import argparse
import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from asyncrl.commands.main import COMMANDS
from asyncrl.config import Program, load_run
from asyncrl.config.command_line import read_flags
from asyncrl.doctor.__main__ import parser as doctor_parser
from asyncrl.engines.megatron.weights.convert_flags import parser as convert_parser
from asyncrl.errors import ConfigError
from asyncrl.journal.__main__ import parser as journal_parser
from tests.unit.website.blocks import ROOT
from tests.unit.website.names import defined_names, is_defined

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
QUICKSTART = ROOT / "configs" / "quickstart.toml"
INSTALLED = Path("/opt/asyncrl")
"""The folder of asyncrl in the container."""
SYSTEM = {
    "break": "bash",
    "cat": "coreutils",
    "cd": "bash",
    "export": "bash",
    "sleep": "coreutils",
    "head": "coreutils",
    "tail": "coreutils",
    "duckdb": "tests/unit/rollout_log/test_files.py runs its query",
    "git": "the address of the repository is not known here",
    "ray": "a dependency",
    "tensorboard": "a dependency",
}
"""Programs that are none of ours, with the reason why their words are not checked."""
ELSEWHERE = ("uv venv", "uv pip")
"""Beginnings of commands that make an environment which is not asyncrl's."""
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_FUNCTION = re.compile(r"([\w/]+\.py):(\w+)")
_PYTHON = ("python", "python3")
_SCRIPT_OF_SLIME = "my_run.sh"
"""A reader's own script, as in docs/doctor.md."""
_KEYWORDS = {"until", "do", "done", "if", "then", "fi", "while"}

Files = Mapping[str, str]
"""The texts of files that the documentation prints, by name."""


def problems_of(text: str, files: Files) -> list[str]:
    """Return one line for each command of a block that would not start as it is written."""
    if text.lstrip().startswith("--"):
        lines = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]
        return [line for words in map(shlex.split, lines) for line in _flag_problems(words, files)]
    return [line for words in commands(text) for line in _problems(words, files)]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each simple command, without variables in front of it."""
    text = re.sub(r"case .*? esac", "", re.sub(r"\\\n", " ", text))
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|()") or word in _KEYWORDS:
                if words:
                    yield words
                words = []
            elif words or not _VARIABLE.match(word):
                words.append(word)


def _problems(words: Sequence[str], files: Files) -> list[str]:
    if words[:2] == ["uv", "run"]:
        words = words[2:]
    if " ".join(words[:2]) in ELSEWHERE or words[0] in SYSTEM:
        return []
    if words[0] in _PYTHON:
        return _module_problems(words[2], words[3:]) if words[1] == "-m" else _problems(words[1:], files)
    name = _here(words[0])
    if name in ("train.py", "train_async.py"):
        return _run_problems(words[1:], files, "train.py" if name == "train.py" else "train_async.py")
    if name.endswith(".py"):
        return [] if name in files or (ROOT / name).is_file() else [f"{name}: no such program"]
    check = _CHECKS.get("pip" if name.endswith("/pip") else name)
    return check(words[1:], files) if check else [f"{name}: no check for this program"]


def _here(name: str) -> str:
    """Return the path of a file of the repository without the folder of the container."""
    path = Path(name)
    return str(path.relative_to(INSTALLED)) if path.is_relative_to(INSTALLED) else name


# ---- runs


def _run_problems(words: Sequence[str], files: Files, program: Program) -> list[str]:
    words = [word for word in words if word != "..."]
    wrong = [line for word in words for line in _function_problems(word, files)]
    config = QUICKSTART
    if "--config" in words:
        place = words.index("--config")
        named = ROOT / _here(words[place + 1])
        config = named if named.is_file() else config
        words = [*words[:place], *words[place + 2 :]]
    try:
        load_run(["--config", str(config), *words, "--dry-run"], program=program)
    except ConfigError as error:
        wrong += str(error).splitlines()
    return wrong


def _flag_problems(words: Sequence[str], files: Files) -> list[str]:
    """Check flags alone: they are right with the quickstart, or in a run without evaluations."""
    small = ["--hf-checkpoint", "model", "--prompt-data", "data.jsonl", "--rm-type", "number", "--num-rollout", "1"]
    first = _run_problems(words, files, "train_async.py")
    try:
        load_run([*small, "--rollout-batch-size", "8", "--n-samples-per-prompt", "2", *words, "--dry-run"])
    except ConfigError:
        return first
    return [line for word in words for line in _function_problems(word, files)]


def _function_problems(word: str, files: Files) -> list[str]:
    """Return a line if a word names a function of a user's file, or of asyncrl, that does not exist."""
    if found := _FUNCTION.match(word):
        return [] if found[2] in defined_names(files.get(found[1], "")) else [f"{word}: no block prints it"]
    if found := re.match(r"(asyncrl[\w.]+):(\w+)", word):
        return [] if is_defined(ROOT, f"{found[1]}.{found[2]}") else [f"{word}: no such name"]
    return []


def _script_problems(words: Sequence[str], files: Files) -> list[str]:
    script = _here(words[0])
    if script == _SCRIPT_OF_SLIME:
        return []
    if not (ROOT / script).is_file():
        return [f"{script}: no such script"]
    return read_flags(words[1:])[1].mistakes


def _sbatch_problems(words: Sequence[str], files: Files) -> list[str]:
    place = next(number for number, word in enumerate(words) if word.endswith(".sh"))
    missing = [] if (ROOT / words[place]).is_file() else [f"{words[place]}: no such script"]
    return [*missing, *_script_problems(words[place + 1 :], files)]


# ---- other programs of ours


def _asyncrl_problems(words: Sequence[str], files: Files) -> list[str]:
    name, *rest = words
    if name == "train":
        return _run_problems(rest, files, "train_async.py")
    if name in ("simulate", "bench"):
        return _module_problems(f"benchmarks.{'simulate' if name == 'simulate' else rest.pop(0)}", rest)
    if name == "convert":
        return _parse_problems(convert_parser("", rest), rest)
    if name == "doctor":
        return _parse_problems(doctor_parser(), rest)
    if name == "journal":
        return _parse_problems(journal_parser(), rest)
    return [] if name in COMMANDS or name == "--help" else [f"asyncrl {name}: no such command"]


def _module_problems(module: str, words: Sequence[str]) -> list[str]:
    """Check ``python -m module``: by its parser, or by the flags that its sources mention."""
    if module == "asyncrl.doctor":
        return _asyncrl_problems(["doctor", *words], {})
    if module == "asyncrl.engines.megatron.weights.convert":
        return _asyncrl_problems(["convert", *words], {})
    path = ROOT.joinpath(*module.split("."))
    sources = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    if module in ("json.tool", "venv"):  # of Python
        return []
    if not sources or not sources[0].is_file():
        return [f"{module}: no such module"]
    return _unmentioned(words, sources)


def _unmentioned(words: Sequence[str], sources: Sequence[Path]) -> list[str]:
    shared = [*(ROOT / "benchmarks" / "common").glob("*.py"), ROOT / "asyncrl" / "sim" / "search" / "options.py"]
    text = "".join(path.read_text() for path in (*sources, *shared))
    flags = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--help"]
    return [f"{flag}: no such flag" for flag in flags if f'"{flag.replace("--no-", "--")}"' not in text]


def _parse_problems(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            parser.parse_args(words)
        except SystemExit:
            return [said.getvalue().strip()]
        except ConfigError as error:
            return [str(error)]
    return []


# ---- programs of others


def _uv_problems(words: Sequence[str], files: Files) -> list[str]:
    """Check ``uv sync``: its extras and groups are those of pyproject.toml."""
    known = {"--extra": PROJECT["project"]["optional-dependencies"], "--group": PROJECT["dependency-groups"]}
    wrong = [f"uv {words[0]}: no check for it"] if words[0] != "sync" else []
    for word, following in zip(words[1:], [*words[2:], ""], strict=True):
        if word in known and following not in known[word]:
            wrong.append(f"{word} {following}: not in pyproject.toml")
        elif word.startswith("--") and word not in (*known, "--no-dev"):
            wrong.append(f"uv sync {word}: no check for it")
    return wrong


def _pip_problems(words: Sequence[str], files: Files) -> list[str]:
    version = re.search(r"^ARG UV_VERSION=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert version is not None
    return [] if words in (["install", "uv"], ["install", f"uv=={version[1]}"]) else [f"pip {' '.join(words)}"]


def _hf_problems(words: Sequence[str], files: Files) -> list[str]:
    """Check ``hf download REPOSITORY [FILE ...] [--repo-type dataset] --local-dir FOLDER``."""
    wrong = [] if words[0] == "download" and "/" in words[1] else [f"hf {words[0]}"]
    options = [word for word in words if word.startswith("--")]
    return wrong + [f"hf download {option}" for option in options if option not in ("--repo-type", "--local-dir")]


def _docker_problems(words: Sequence[str], files: Files) -> list[str]:
    arguments = re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    given = [word.partition("=")[0] for option, word in pairwise(words) if option == "--build-arg"]
    wrong = [f"--build-arg {name}: not in the Dockerfile" for name in given if name not in arguments]
    return wrong if words[0] in ("build", "run") else [f"docker {words[0]}"]


def _path_problems(words: Sequence[str], files: Files) -> list[str]:
    """Check a program that gets files or folders of the repository."""
    paths = [word for word in words if re.fullmatch(r"[\w/]+(?:\.py)?", word) and not word.isdigit()]
    return [f"{path}: no such file" for path in paths if path not in _WORDS and not (ROOT / path).exists()]


_WORDS = ("check", "build", "serve", "gpu")
"""Words after ``ruff``, ``mkdocs`` and ``pytest -m`` that are no paths."""
_CHECKS: Mapping[str, Callable[[Sequence[str], Files], list[str]]] = {
    "asyncrl": _asyncrl_problems,
    "bash": _script_problems,
    "docker": _docker_problems,
    "hf": _hf_problems,
    "mkdocs": _path_problems,
    "mypy": _path_problems,
    "pip": _pip_problems,
    "pytest": _path_problems,
    "ruff": _path_problems,
    "sbatch": _sbatch_problems,
    "uv": _uv_problems,
}
