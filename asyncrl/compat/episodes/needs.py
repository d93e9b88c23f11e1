"""The symbols of slime that a user's file imports and the shim lacks, found without importing either."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncrl.compat.slime_path import PACKAGE

_CAUGHT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException", "AttributeError"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A symbol that asyncrl does not have."""

    place: str
    """File and line."""
    symbol: str
    is_at_import: bool
    """Whether the file fails when it is imported; else when a function of it runs."""

    def __str__(self) -> str:
        return f"{self.place} needs {self.symbol}, which asyncrl does not have"


def needs_of(file: Path) -> list[Need]:
    """Return what ``file`` imports from slime and the shim lacks; imports that it guards with ``try`` do not count.

    A file that cannot be read or parsed needs nothing: its import tells why.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    return [
        Need(place=f"{file.name}:{line}", symbol=symbol, is_at_import=is_at_import)
        for symbol, line, is_at_import in _imported(tree.body, is_at_import=True)
        if not has_symbol(symbol)
    ]


def has_symbol(symbol: str) -> bool:
    """Return whether the shim has a module, or a name of a module, by its dotted name."""
    module, _, name = symbol.rpartition(".")
    return symbol == PACKAGE.name or _file(symbol) is not None or name in _names(module)


def _imported(nodes: list[ast.stmt], *, is_at_import: bool) -> Iterator[tuple[str, int, bool]]:
    """Yield symbol, line and whether it is imported with the file, for each import of slime that is not guarded."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((symbol, node.lineno, is_at_import) for symbol in _symbols(node))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imported(node.orelse, is_at_import=is_at_import)
        elif not (isinstance(node, ast.Try) and _is_guarded(node)):
            is_inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imported(_statements(node), is_at_import=is_at_import and not is_inside)


def _symbols(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    else:
        found = [] if node.level else [f"{node.module}.{alias.name}".removesuffix(".*") for alias in node.names]
    return [symbol for symbol in found if symbol.partition(".")[0] == PACKAGE.name]


def _statements(node: ast.stmt) -> list[ast.stmt]:
    """Return the statements inside a statement, in every branch."""
    inner = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
    handlers = [handler.body for handler in getattr(node, "handlers", [])]
    return [each for block in (*inner, *handlers) for each in block if isinstance(each, ast.stmt)]


def _is_guarded(node: ast.Try) -> bool:
    caught = (handler.type for handler in node.handlers)
    names = (ast.unparse(kind) if kind is not None else "Exception" for kind in caught)
    return any(name in _CAUGHT for each in names for name in each.strip("()").replace(" ", "").split(","))


def _file(module: str) -> Path | None:
    inner = PACKAGE.joinpath(*module.split(".")[1:])
    found = (inner / "__init__.py", inner.with_suffix(".py"))
    return next((file for file in found if file.is_file()), None)


@functools.cache
def _names(module: str) -> frozenset[str]:
    """Return the names that a module of the shim binds."""
    file = _file(module)
    if file is None:
        return frozenset()
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
            if node.value is not None and any(isinstance(each, ast.Name) and each.id == "LAZY" for each in targets):
                found |= set(ast.literal_eval(node.value))
    return frozenset(found)
