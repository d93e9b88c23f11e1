"""Names of all flags that the installed SGLang server and router accept, read from their source.

Importing SGLang takes 10 s or more; parsing the source of its argument classes takes 0.1 s.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def known_server_flags() -> frozenset[str]:
    """Return all flags of ``sglang.launch_server``, in the form ``mem-fraction-static``."""
    tree = _parsed("sglang", "srt/server_args.py")
    return frozenset(_fields(tree, "ServerArgs")) | frozenset(_explicit(tree))


@functools.cache
def known_router_flags() -> frozenset[str]:
    """Return all flags of ``sglang_router.launch_router``, in the form ``cache-threshold``."""
    return frozenset(_explicit(_parsed("sglang_router", "router_args.py")))


def _parsed(package: str, file: str) -> ast.Module:
    found = importlib.util.find_spec(package)  # for a top-level package this imports nothing
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed")
    return ast.parse((Path(found.submodule_search_locations[0]) / file).read_text())


def _fields(tree: ast.Module, class_name: str) -> Iterator[str]:
    """Yield the flags of a dataclass with fields annotated ``A[type, help]`` or ``A[type, Arg(aliases=[...])]``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield from _field_flags(field.target.id, field.annotation)


def _field_flags(name: str, annotation: ast.expr) -> Iterator[str]:
    source = ast.unparse(annotation)
    if not source.startswith("A[") or "no_cli=True" in source:
        return  # not on the command line
    yield name.replace("_", "-")
    yield from _strings_starting_with_dashes(annotation)


def _explicit(tree: ast.Module) -> Iterator[str]:
    """Yield the flags of all ``add_argument`` calls; the router's are written ``f"--{prefix}name"``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for argument in node.args:
                yield from _strings_starting_with_dashes(argument)


def _strings_starting_with_dashes(node: ast.expr) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.JoinedStr):
            text = "".join(str(piece.value) for piece in part.values if isinstance(piece, ast.Constant))
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            text = part.value
        else:
            continue
        if text.startswith("--") and " " not in text and len(text) > 2:
            yield text[2:]
