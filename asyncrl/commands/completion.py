"""Completion of ``asyncrl``'s commands and flags in a shell, made by shtab from the argument parsers."""

import argparse

import shtab

from asyncrl.commands.main import COMMANDS, benchmarks
from asyncrl.config.command_line import parser
from asyncrl.doctor.__main__ import parser as doctor_parser
from asyncrl.engines.megatron.weights.convert_flags import parser as convert_parser
from asyncrl.journal.__main__ import parser as journal_parser
from asyncrl.page.command import parser as page_parser


def script(shell: str) -> str:
    """Return the script for ``shell``, bash or zsh."""
    completed: str = shtab.complete(_whole(), shell=shell)
    return completed


def _whole() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="asyncrl")
    commands = root.add_subparsers()
    own = {"train": parser(), "page": page_parser(), "journal": journal_parser(), "doctor": doctor_parser()}
    own["convert"] = convert_parser("", ())
    for name, command in COMMANDS.items():
        parents = [own[name]] if name in own else []
        sub = commands.add_parser(name, parents=parents, help=command.summary, add_help=not parents)
        _complete_files(sub)
        if name == "bench":
            sub.add_argument("name", choices=sorted(benchmarks()))
        elif name == "completion":
            sub.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    return root


def _complete_files(command: argparse.ArgumentParser) -> None:
    for action in command._actions:  # noqa: SLF001 (argparse has no public list of them)
        if isinstance(action.metavar, str) and ("PATH" in action.metavar or "FILE" in action.metavar):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar == "RUN_DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
