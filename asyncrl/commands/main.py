"""The command ``asyncrl``: every program of the project under one name.

    asyncrl train --config configs/quickstart.toml        what train_async.py does
    asyncrl bench simulate --check                        what python -m benchmarks.simulate does

This module imports little: worker processes of a run import it again.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from runpy import run_module
from typing import NoReturn

_WIDTH = 12
_HELP = ("-h", "--help", "help")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One word after ``asyncrl``."""

    summary: str
    run: Callable[[Sequence[str]], int]
    """Runs the command with the words that follow, and returns the exit code."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command that ``argv`` (without the program's name) names, and exit with its code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in _HELP:
        sys.stdout.write(usage())
        raise SystemExit(0 if words else 2)
    name, *rest = words
    command = COMMANDS.get(name)
    if command is None:
        _refuse(f"asyncrl has no command {name!r}", name, COMMANDS, "asyncrl --help lists the commands")
    sys.argv[0] = f"asyncrl {name}"  # argparse names the program by it
    if name in _RUNS:
        from asyncrl.app.ending.leaving import leave

        leave(command.run(rest))
    raise SystemExit(command.run(rest))


def usage() -> str:
    """Return the text of ``asyncrl --help``."""
    lines = [f"  {name:{_WIDTH}}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(("usage: asyncrl COMMAND [argument ...]", "", *lines, "", _MORE, ""))


_MORE = """asyncrl COMMAND --help describes a command.  Tab completion of commands and flags:

  eval "$(asyncrl completion bash)"         in ~/.bashrc; zsh likewise"""


def _refuse(what: str, given: str, known: Mapping[str, object], otherwise: str) -> NoReturn:
    """Exit with code 2 and one line, which names what was probably meant."""
    near = get_close_matches(given, known, 1)
    sys.stderr.write(f"error: {what}; {f'did you mean {near[0]}?' if near else otherwise}\n")
    raise SystemExit(2)


# ---- the commands


def _train(argv: Sequence[str]) -> int:
    from asyncrl.app.entry import main as train

    return train(argv)


def _doctor(argv: Sequence[str]) -> int:
    from asyncrl.doctor.__main__ import main as doctor

    return doctor(argv)


def _page(argv: Sequence[str]) -> int:
    from asyncrl.page.command import main as page

    return page(argv)


def _journal(argv: Sequence[str]) -> int:
    from asyncrl.journal.__main__ import main as journal

    return journal(argv)


def _convert(argv: Sequence[str]) -> int:
    from asyncrl.engines.megatron.weights import convert_flags

    convert_flags.parser(convert_flags.__doc__, argv).parse_args(argv)  # --help and wrong words need no torch

    from asyncrl.engines.megatron.weights.convert import main as convert

    return convert(argv)


def _simulate(argv: Sequence[str]) -> int:
    return _bench(("simulate", *argv))


def _bench(argv: Sequence[str]) -> int:
    """Run a benchmark, or list them.  Exits with code 2 outside a checkout of the repository."""
    known = benchmarks()
    if not known:
        sys.stderr.write("error: benchmarks are part of the repository: run this in a checkout of it\n")
        return 2
    if not argv or argv[0] in _HELP:
        lines = [f"  {name:16}{summary}" for name, summary in known.items()]
        sys.stdout.write("\n".join(("usage: asyncrl bench NAME [argument ...]", "", *lines, "")))
        return 0 if argv else 2
    if argv[0] not in known:
        _refuse(f"there is no benchmark {argv[0]!r}", argv[0], known, "asyncrl bench --help lists them")
    sys.argv = [f"asyncrl bench {argv[0]}", *argv[1:]]
    run_module(f"benchmarks.{argv[0]}", run_name="__main__")  # with what each does before its ``main``
    return 0


def benchmarks() -> dict[str, str]:
    """Return the first line of each benchmark's documentation, by name; empty outside a checkout."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m does
    found = find_spec("benchmarks")
    folders = () if found is None else found.submodule_search_locations or ()
    programs = sorted(path for folder in folders for path in Path(folder).glob("*/__main__.py"))
    return {path.parent.name: _first_line(path) for path in programs}


def _first_line(path: Path) -> str:
    return path.read_text(encoding="utf-8").removeprefix('"""').partition("\n")[0].rstrip('"').rstrip(".:")


def _completion(argv: Sequence[str]) -> int:
    from asyncrl.commands.completion import script

    shells = ("bash", "zsh")
    if list(argv) not in [[shell] for shell in shells]:
        sys.stderr.write("usage: asyncrl completion bash|zsh\n")
        return 0 if argv and argv[0] in _HELP else 2
    sys.stdout.write(script(argv[0]))
    return 0


COMMANDS: Mapping[str, Command] = {
    "train": Command(summary="train a model; all flags are those of train_async.py", run=_train),
    "page": Command(summary="show runs in the browser, from their run directories", run=_page),
    "journal": Command(summary="check the journal of a run, show its account, export its groups", run=_journal),
    "doctor": Command(summary="translate a launch script of slime's, and list what differs", run=_doctor),
    "convert": Command(summary="convert weights between Hugging Face and the formats of trainers", run=_convert),
    "simulate": Command(summary="compare schedules on a virtual clock, before renting GPUs", run=_simulate),
    "bench": Command(summary="run a benchmark of the repository", run=_bench),
    "completion": Command(summary="print the completion script of a shell", run=_completion),
}
"""The commands by name."""
_RUNS = ("train",)
"""Commands that may leave threads of user code behind."""
