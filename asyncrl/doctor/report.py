"""The report on a launch script: its training command in asyncrl's terms, and what stands in the way."""

import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import check_passthrough, load_run
from asyncrl.config.knobs import knobs
from asyncrl.config.values import shown
from asyncrl.doctor.bash import read_script
from asyncrl.doctor.launch import PROGRAMS, Flag, Launch, find_launch
from asyncrl.doctor.settings import MASK, Translation, Verdict, as_toml, other_defaults, translate, variables
from asyncrl.doctor.shell import Shell
from asyncrl.doctor.symbols import UserFunction, examine
from asyncrl.engines.sglang.server_flags import known_router_flags, known_server_flags
from asyncrl.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that was found in a launch script."""

    toml: str
    """The settings as a TOML file."""
    launch: Launch
    translation: Translation
    functions: tuple[UserFunction, ...]
    python_path: tuple[Path, ...]
    """Folders that must be on PYTHONPATH for the functions."""
    mistakes: tuple[str, ...]
    """Places where the script loses words."""
    refusals: tuple[str, ...]
    """asyncrl's error lines for the TOML file."""
    missing_files: tuple[str, ...]
    """Files that the script includes, and that were not found."""
    absent: tuple[str, ...]
    """Paths of data and checkpoints that do not exist on this machine."""
    assumed: tuple[str, ...]
    """Assumptions about the script."""

    @property
    def num_obstacles(self) -> int:
        """The number of reasons why the script's run does not start as it is."""
        flags = self.translation.of(Verdict.MISSING) + self.translation.of(Verdict.UNKNOWN_VALUE)
        problems = {line for function in self.functions for line in function.problems}
        imports = {each for function in self.functions for each in function.imports if not each.is_there}
        return (
            len(self.mistakes)
            + len(flags)
            + len(problems)
            + len(imports)
            + len(self.refusals)
            + len(self.missing_files)
            + len(self.launch.stray)
        )


def examine_script(path: Path, given: Mapping[str, str]) -> Report:
    """Read a launch script with the variables ``given``.

    Raises DataError if it cannot be read or has no training command.
    """
    try:
        shell = read_script(path, given)
    except RecursionError:
        raise DataError(f"{path}: nested too deeply") from None
    launch = find_launch(shell)
    if launch is None:
        raise DataError(f"{path}: no training command: no python with {' or '.join(PROGRAMS)} was found")
    translation = translate(launch.program, launch.flags)
    toml = as_toml(
        translation,
        [
            f"{path.name} of slime, translated by python -m asyncrl.doctor.",
            "Relative paths are relative to this file; slime's are relative to the folder where it starts.",
        ],
    )
    named = _named_folders(launch, shell)
    functions = tuple(_functions(translation, _roots(named, shell)))
    return Report(
        toml=toml,
        launch=launch,
        translation=translation,
        functions=functions,
        python_path=tuple(_python_path(functions, named)),
        mistakes=tuple(f"{note.place}: {note.text}" for note in shell.mistakes),
        refusals=tuple(_refusals(translation, shell)),
        missing_files=tuple(shell.missing_files),
        absent=tuple(_absent(launch.flags, shell)),
        assumed=tuple(f"{note.place}: {note.text}" for note in shell.notes) + launch.notes,
    )


def _functions(translation: Translation, roots: Sequence[Path]) -> Iterator[UserFunction]:
    """Examine each user function that is not judged by its flag alone."""
    for finding in translation.findings:
        flag, verdict = finding.flag, finding.verdict
        if verdict in _LEFT_OUT or not flag.name.endswith("-path") or len(flag.values) != 1:
            continue
        path = flag.values[0].value
        is_judged = verdict is Verdict.MISSING and path.startswith("slime.")
        if _is_function(path) and not is_judged:
            yield examine(flag.name, path, roots)


_LEFT_OUT = (Verdict.TRUE_ANYWAY, Verdict.UNKNOWN_VALUE)
"""Verdicts on flags whose functions a run does not load, or whose names are unknown."""


def _is_function(path: str) -> bool:
    """Whether a path names a function instead of a file or folder."""
    return ".py:" in path or (
        os.sep not in path and path.replace("_", "a").replace(":", ".").replace(".", "a").isalnum()
    )


def _named_folders(launch: Launch, shell: Shell) -> list[Path]:
    """Return the folders of the script's PYTHONPATH that exist."""
    written = launch.environment.get("PYTHONPATH")
    entries = variables(written, launch.environment).split(":") if written else []
    return [found for entry in entries if entry and (found := shell.located(entry)) is not None and found.is_dir()]


def _roots(named: Sequence[Path], shell: Shell) -> list[Path]:
    """Return the folders of PYTHONPATH, and the script's folder with those above it up to its project's root."""
    above = list(shell.script.parents)[:_MOST_FOLDERS]
    top = next((place for place, folder in enumerate(above) if (folder / PROGRAMS[0]).exists()), len(above) - 1)
    return list(dict.fromkeys([*named, *above[: top + 1], Path.cwd()]))


def _python_path(functions: Sequence[UserFunction], named: Sequence[Path]) -> Iterator[Path]:
    """Yield the folders of the functions, and those of the script's PYTHONPATH that hide no package of asyncrl's."""
    needed = [each.root for each in functions if each.root is not None]
    others = [folder for folder in named if not any((folder / package).is_dir() for package in _HIDDEN)]
    if needed:
        yield from dict.fromkeys(folder.resolve() for folder in (*needed, *others))


_HIDDEN = ("megatron", "sglang", "slime")
"""Packages of which asyncrl has its own version, and which slime's scripts put on PYTHONPATH."""

_MOST_FOLDERS = 4
"""The maximum number of folders above a script that are searched for user functions."""


_FILES_OF_SETTINGS = ("custom-config-path", "eval-config")
"""Settings whose files have further settings, which are checked as well."""


def _refusals(translation: Translation, shell: Shell) -> list[str]:
    """Return asyncrl's error lines for the settings, without those about missing files."""
    checked = Translation(lines=_with_located_files(translation.lines | translation.placeholders, shell))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.toml"
        file.write_text(as_toml(checked, []), encoding="utf-8")
        try:
            run = load_run(["--config", str(file), "--dry-run"])
            check_passthrough(run, known_server_flags(), known_router_flags())
        except ConfigError as error:
            return [line.removeprefix(f"{file}: ") for line in str(error).splitlines()]
        except ModuleNotFoundError:  # SGLang is not installed here, so its flags are not checked
            return []
    return []


def _with_located_files(lines: Mapping[str, str], shell: Shell) -> dict[str, str]:
    """Return the TOML values with the files of settings where they are found; without the files that are missing."""
    found = dict(lines)
    for name in _FILES_OF_SETTINGS:
        if name in found:
            file = shell.located(json.loads(found.pop(name)))
            found |= {} if file is None else {name: shown(file)}
    return found


def _absent(flags: Iterable[Flag], shell: Shell) -> Iterator[str]:
    for flag in flags:
        knob = knobs().get(flag.name)
        if knob is None or not (knob.type is Path or knob.name == "eval-prompt-data") or knob.name == "save":
            continue
        for value in flag.values:
            path = value.value.partition("@[")[0]
            is_there = os.path.exists(path) or (not os.path.isabs(path) and shell.located(path) is not None)
            if value.is_known and os.sep in path and not is_there:
                yield f"--{flag.name} {value.value}"


def written(report: Report) -> str:
    """Return the report as text for a person."""
    sections = [
        (f"{report.launch.place}: {report.launch.program} with {len(report.launch.flags)} flags", []),
        ("Mistakes in the script, which lose flags", list(report.mistakes)),
        *_flag_sections(report.translation),
        ("Defaults that are not slime's, for flags that the script leaves out", other_defaults(report.translation)),
        *_function_sections(report.functions),
        ("Words that belong to no flag", list(report.launch.stray)),
        ("Files that the script includes, and that were not found", list(report.missing_files)),
        ("asyncrl refuses these settings", list(report.refusals)),
        ("Assumed about the script, which was not run", list(report.assumed)),
        ("Folders of the user functions; export them before the run", _export(report.python_path)),
        ("Environment of the training command; export what you need", _environment(report.launch)),
        ("Paths that do not exist on this machine", list(report.absent)),
    ]
    text = "\n\n".join(_section(title, lines) for place, (title, lines) in enumerate(sections) if lines or not place)
    return f"{text}\n\n{_verdict(report.num_obstacles)}"


def _verdict(num_obstacles: int) -> str:
    if not num_obstacles:
        return "Nothing is missing: the TOML file starts this run as it is."
    return f"{num_obstacles} thing{'s' * (num_obstacles > 1)} to change before this run starts."


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}:" if lines else title, *(f"  {line}" for line in lines)])


def _flag_sections(translation: Translation) -> Iterator[tuple[str, list[str]]]:
    found = translation.of(Verdict.TRUE_ANYWAY)
    yield f"True anyway ({len(found)})", [", ".join(finding.flag.written for finding in found)] * bool(found)
    for verdict, title in (
        (Verdict.DIFFERENT, "Different"),
        (Verdict.MISSING, "Missing"),
        (Verdict.UNKNOWN_VALUE, "Unknown values"),
    ):
        findings = translation.of(verdict)
        yield f"{title} ({len(findings)})", [f"{finding.flag.written}: {finding.reason}" for finding in findings]


def _function_sections(functions: Sequence[UserFunction]) -> Iterator[tuple[str, list[str]]]:
    imports = list(dict.fromkeys(each for function in functions for each in function.imports))
    yield "User functions", [f"--{each.flag} {each.path}: {each.place or 'not found'}" for each in functions]
    yield (
        "User functions that cannot be used",
        list(dict.fromkeys(line for each in functions for line in each.problems)),
    )
    yield (
        "Symbols of slime that asyncrl lacks",
        [f"{each.place}: {each.symbol}" for each in imports if not each.is_there],
    )


def _export(folders: Sequence[Path]) -> list[str]:
    return [f"export PYTHONPATH={shlex.quote(':'.join(map(str, folders)))}"] if folders else []


def _environment(launch: Launch) -> list[str]:
    return [
        f"{name}={MASK if _SECRET.search(name) else value.value}"
        for name, value in sorted(launch.environment.items())
        if name != "PYTHONPATH"  # python_path has what a run needs of it
    ]


_SECRET = re.compile(r"(?:^|_)(?:KEY|TOKEN|SECRET|PASSWORD)$")
"""Names of variables whose values are not shown."""
