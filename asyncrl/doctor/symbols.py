"""The user functions that a script names: their files, their signatures, and the symbols of slime that they import.

Files are parsed, never imported.
"""

import ast
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl import compat
from asyncrl.compat.episodes.needs import has_symbol
from asyncrl.doctor.signatures import signature_line

_MOST_FILES = 64
"""The maximum number of files that are searched for one function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """A symbol of slime that a user's file imports."""

    symbol: str
    """The dotted name in slime."""
    place: str
    """File and line."""

    @property
    def is_there(self) -> bool:
        """Whether ``import slime`` gives it in a run."""
        return has_symbol(self.symbol)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFunction:
    """A function that a flag names."""

    flag: str
    path: str
    place: str | None
    """The function's file, or its name in asyncrl; None if there is neither."""
    problems: tuple[str, ...]
    """Reasons why it cannot be used."""
    imports: tuple[Import, ...]
    root: Path | None = None
    """The folder that must be on PYTHONPATH; None for a function of asyncrl, a file, or one that is not found."""


def examine(flag: str, path: str, roots: Sequence[Path]) -> UserFunction:
    """Find the function ``path`` of ``flag`` in the folders ``roots``, and examine its file."""
    if path in compat.OUR_NAMES:
        return UserFunction(flag=flag, path=path, place=compat.OUR_NAMES[path], problems=(), imports=())
    if path.startswith("slime."):
        problem = f"{path} is a function of slime that asyncrl lacks"
        return UserFunction(flag=flag, path=path, place=None, problems=(problem,), imports=())
    module, name = _split(path)
    root = next((root for root in roots if _found(module, [root]) is not None), None)
    file = None if root is None else _found(module, [root])
    if file is None:
        problem = f"{module} is missing in {', '.join(map(str, roots))}"
        return UserFunction(flag=flag, path=path, place=None, problems=(problem,), imports=())
    line = _broken(file) or signature_line(flag, _tree(file), name)
    problems = () if line is None else (f"{file}: {line}",)
    return UserFunction(
        flag=flag,
        path=path,
        place=str(file),
        problems=problems,
        imports=tuple(_imports(file, roots)),
        root=None if module.endswith(".py") else root,
    )


def _split(path: str) -> tuple[str, str]:
    """Return module or file, and name, of ``module.name``, ``module:name`` or ``file.py:name(arguments)``."""
    plain = path.partition("(")[0]
    module, _, name = plain.rpartition(":" if ":" in plain else ".")
    return module, name


def _found(module: str, roots: Sequence[Path]) -> Path | None:
    if module.endswith(".py"):
        candidates = [root / module for root in roots]
    else:
        inner = Path(*module.split(".")) if module.strip(".") else Path("missing")
        candidates = [each for root in roots for each in (root / f"{inner}.py", root / inner / "__init__.py")]
    return next((each for each in candidates if os.path.isfile(each)), None)


def _imports(file: Path, roots: Sequence[Path]) -> Iterator[Import]:
    """Yield every import of slime in ``file`` and in the user's files that it imports."""
    waiting, seen = [file], {file}
    while waiting:
        here = waiting.pop(0)
        if _broken(here) is not None:
            continue
        for module, names, line, base in _statements(here):
            if module.partition(".")[0] == "slime":
                for name in names or ("",):
                    symbol = f"{module}.{name}".removesuffix(".")
                    yield Import(symbol=symbol, place=f"{here}:{line}")
                continue
            places = (base, *roots) if base else roots
            for each in (module, *(f"{module}.{name}".strip(".") for name in names)):
                other = _found(each, places[:1] if base else places)
                if other is not None and other not in seen and len(seen) < _MOST_FILES:
                    seen.add(other)
                    waiting.append(other)


def _statements(file: Path) -> Iterator[tuple[str, tuple[str, ...], int, Path | None]]:
    """Yield module, names, line and, for a relative import, its folder, for each import in ``file``."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, (), node.lineno, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else None
            yield node.module or "", tuple(alias.name for alias in node.names), node.lineno, base


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes())


def _broken(file: Path) -> str | None:
    """Return why ``file`` cannot be parsed, or None."""
    try:
        _tree(file)
    except (OSError, SyntaxError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None
