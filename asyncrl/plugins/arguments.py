"""Arguments in a path: ``module:Name(low=0.1, high=0.9)``.  Only literals are accepted; no expression is evaluated."""

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import PluginError


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of the call that makes the plug-in."""

    text: str
    """The arguments as written, without the parentheses."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


_WITH_ARGUMENTS = (re.compile(r"(.*?:\w+)\((.*)\)", re.DOTALL), re.compile(r"([\w.]+)\((.*)\)", re.DOTALL))
_HOW = "write arguments as in name(0.5) or name(low=0.1, high=0.9)"


def split(path: str) -> tuple[str, Arguments | None]:
    """Return the path without arguments, and the arguments if it has parentheses.  Raises PluginError."""
    for pattern in _WITH_ARGUMENTS:
        found = pattern.fullmatch(path.strip())
        if found:
            return found[1], _parsed(found[2])
    if re.search(r"\(|\)", path.rpartition(":")[2] if ":" in path else path):
        raise PluginError(_HOW)
    return path, None


def made(name: str, factory: Any, arguments: Arguments) -> Any:
    """Return ``factory(...)``.  Raises PluginError if it does not accept the arguments, or raises."""
    written = f"{name}({arguments.text})"
    if not callable(factory):
        raise PluginError(f"'{name}' is {factory!r}, which takes no arguments")
    if inspect.iscoroutinefunction(factory) or inspect.iscoroutinefunction(type(factory).__call__):
        raise PluginError(
            f"'{name}' is written with 'async def', so it cannot make a plug-in; name it without arguments"
        )
    try:
        inspect.signature(factory).bind(*arguments.args, **arguments.kwargs)
    except (TypeError, ValueError) as error:
        raise PluginError(f"{written}: {error}{_taken(factory)}") from None
    try:
        return factory(*arguments.args, **arguments.kwargs)
    except Exception as error:
        raise PluginError(f"{written} raised {type(error).__name__}: {error}") from error


def _taken(factory: Any) -> str:
    try:
        return f"; it takes {inspect.signature(factory)}".removesuffix(" -> None")
    except ValueError:  # written in C
        return ""


def _parsed(text: str) -> Arguments:
    try:
        call = ast.parse(f"_({text})", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise PluginError(f"cannot read the arguments '({text})'; {_HOW}") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or _repeats(call.keywords):
        raise PluginError(f"cannot read the arguments '({text})'; {_HOW}")
    return Arguments(
        text=text,
        args=tuple(_literal(argument) for argument in call.args),
        kwargs={_named(keyword): _literal(keyword.value) for keyword in call.keywords},
    )


def _repeats(keywords: list[ast.keyword]) -> bool:
    return len({keyword.arg for keyword in keywords}) < len(keywords)


def _named(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise PluginError(f"argument **{ast.unparse(keyword.value)} cannot be read; {_HOW}")
    return keyword.arg


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise PluginError(
            f"argument {ast.unparse(node)} is not a literal: a number, a text, True, False, None, "
            "or a tuple, list, set or dict of those"
        ) from None
