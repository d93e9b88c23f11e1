"""The check of a function's signature from its source, by the rules of ``plugins/kinds``."""

import ast
import copy
from collections.abc import Mapping
from typing import Any

from asyncrl.errors import PluginError
from asyncrl.plugins import kinds
from asyncrl.plugins.episodes import FLAG, shape_of
from asyncrl.plugins.resolve import signature_problem

_KINDS: Mapping[str, kinds.Kind[Any]] = {
    kind.flag: kind for kind in vars(kinds).values() if isinstance(kind, kinds.Kind)
}
"""The required signature of the function of each flag."""

GENERATES = FLAG.removeprefix("--")

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def signature_line(flag: str, tree: ast.Module, name: str) -> str | None:
    """Return what is wrong with the function ``name`` of a parsed file for ``flag``; None if nothing is found."""
    kind = _KINDS.get(f"--{flag}")
    function = next((node for node in tree.body if isinstance(node, _Function) and node.name == name), None)
    if function is None:
        return None if name in _bound(tree) else f"has no function '{name}'"
    if function.decorator_list or (kind is None and flag != GENERATES):
        return None
    problem = _generate_problem(_stub(function)) if kind is None else signature_problem(_stub(function), kind)
    return None if problem is None else f"line {function.lineno}: '{name}' {problem}"


def _generate_problem(function: Any) -> str | None:
    try:
        shape_of(function)
    except PluginError as error:
        return str(error)
    return None


def _bound(tree: ast.Module) -> set[str]:
    """Return the names of classes, imports and assignments at the top of a file; their signatures are not checked."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def _stub(function: _Function) -> Any:
    """Return an empty function with the parameters of ``function``: nothing of the user's code is run."""
    arguments = copy.deepcopy(function.args)
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    stub = type(function)(name=function.name, args=arguments, body=[ast.Pass()], decorator_list=[], type_params=[])
    names: dict[str, Any] = {}
    module = ast.fix_missing_locations(ast.Module(body=[stub], type_ignores=[]))
    exec(compile(module, "<signature>", "exec"), names)
    return names[function.name]
