"""The value of a condition in a launch script: true, false, or unknown without running a command."""

import fnmatch
import operator
from collections.abc import Callable
from typing import Any

from asyncrl.doctor.expand import source, text
from asyncrl.doctor.shell import Shell
from asyncrl.doctor.words import Text

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


def holds(node: Any, shell: Shell) -> bool | None:
    """Return whether a condition is true; None if that depends on a command or a file."""
    if node.type == "test_command":
        inner = node.named_children
        return holds(inner[0], shell) if len(inner) == 1 and not _joins_tests(node) else None
    if node.type == "list":
        return _combined(node, shell)
    if node.type in ("negated_command", "parenthesized_expression") and node.named_children:
        inside = holds(node.named_children[0], shell)
        return inside if inside is None or node.type == "parenthesized_expression" else not inside
    if node.type == "unary_expression":
        return _unary(node, shell)
    if node.type == "binary_expression":
        return _binary(node, shell)
    return {"true": True, "false": False}.get(source(node))


def _joins_tests(node: Any) -> bool:
    """Whether ``[ ... ]`` has ``-a`` or ``-o``, around which the grammar finds other operands than bash."""
    is_join = node.type == "test_operator" and source(node) in ("-a", "-o")
    return is_join or any(_joins_tests(child) for child in node.children)


def _combined(node: Any, shell: Shell) -> bool | None:
    left, right = (holds(child, shell) for child in (node.named_children[0], node.named_children[-1]))
    return _either(left, right) if any(child.type == "||" for child in node.children) else _both(left, right)


def _both(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def _either(left: bool | None, right: bool | None) -> bool | None:
    if left or right:
        return True
    return None if left is None or right is None else False


def _unary(node: Any, shell: Shell) -> bool | None:
    operation, operand = source(node.children[0]), node.children[-1]
    if operation == "!":
        inside = holds(operand, shell)
        return None if inside is None else not inside
    if operation not in ("-z", "-n"):
        return None
    value = text(operand, shell)
    if value.unknown:
        return None
    is_empty = bool(value.unset) or not value.value
    return is_empty == (operation == "-z")


def _binary(node: Any, shell: Shell) -> bool | None:
    if len(node.children) != 3:
        return None
    left, operation, right = node.children
    sign = source(operation)
    if sign in ("&&", "||"):
        both = holds(left, shell), holds(right, shell)
        return _either(*both) if sign == "||" else _both(*both)
    values = text(left, shell), text(right, shell)
    if not all(value.is_known for value in values):
        return None
    return _compared(sign, *values)


def _compared(sign: str, left: Text, right: Text) -> bool | None:
    if sign in ("=", "=="):
        return fnmatch.fnmatchcase(left.value, right.value)
    if sign == "!=":
        return not fnmatch.fnmatchcase(left.value, right.value)
    try:
        return _NUMBERS[sign](int(left.value), int(right.value))
    except (KeyError, ValueError):
        return None
