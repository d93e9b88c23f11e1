"""Imports of a program, looked up in the sources without importing anything."""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.unit.website.blocks import ROOT

SLIME = ROOT / "asyncrl" / "compat" / "slime_shim"
"""The folder with the package ``slime`` that user code can import."""


def unknown_imports(source: str, files: Mapping[str, str]) -> list[str]:
    """Return the imports of ``source`` that lead nowhere.  ``files``: those of the documentation."""
    return [dotted for dotted in _imports(ast.parse(source)) if not _is_known(dotted, files)]


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{each.name}" for each in node.names)


def _is_known(dotted: str, files: Mapping[str, str]) -> bool:
    package, _, rest = dotted.partition(".")
    if package == "asyncrl":
        return is_defined(ROOT, dotted)
    if package == "slime":
        return is_defined(SLIME.parent, f"{SLIME.name}.{dotted}") or is_defined(SLIME.parent, f"{SLIME.name}.{rest}")
    if f"{package}.py" in files:
        return not rest or rest in defined_names(files[f"{package}.py"])
    return importlib.util.find_spec(package) is not None


def is_defined(base: Path, dotted: str) -> bool:
    """Return whether a dotted name is a module below ``base``, or a name at the top level of one."""
    path, parts = base, dotted.split(".")
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    source = path / "__init__.py"
    if parts and (path / f"{parts[0]}.py").is_file():
        source = path / f"{parts.pop(0)}.py"
    return not parts or (len(parts) == 1 and source.is_file() and parts[0] in _names_of(source))


@functools.cache
def _names_of(source: Path) -> frozenset[str]:
    return defined_names(source.read_text())


def defined_names(source: str) -> frozenset[str]:
    """Return the names that the top level of a program defines."""
    return frozenset(name for node in ast.parse(source).body for name in _defined(node))


def _defined(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=targets):
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.TypeAlias(name=ast.Name(id=name)):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from ((each.asname or each.name) for each in names)
