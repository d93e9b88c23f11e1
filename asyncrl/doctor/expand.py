"""The expansion of words in a launch script, as far as it is possible without running a command."""

import ast
import dataclasses
import fnmatch
import operator
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from asyncrl.doctor.shell import Note, Shell
from asyncrl.doctor.words import Break, Part, Text, joined, literal, split

Parts = list[Part | Break]


def words(node: Any, shell: Shell) -> list[Text]:
    """Return the words that bash makes of one written word."""
    return split(parts(node, shell, is_quoted=False))


def text(node: Any, shell: Shell) -> Text:
    """Return a written word as one text, as in an assignment."""
    return joined(parts(node, shell, is_quoted=True))


def parts(node: Any, shell: Shell, *, is_quoted: bool) -> Parts:
    """Return the expanded parts of one written word."""
    found = _PARTS.get(node.type)
    if found is not None:
        return found(node, shell, is_quoted)
    return [literal(_unescaped(source(node)))]


def source(node: Any) -> str:
    """Return the text of a syntax node as it is written in the script."""
    return str(node.text.decode(errors="replace"))


def _unescaped(written: str) -> str:
    return re.sub(r"\\(\n|.)", lambda found: "" if found[1] == "\n" else found[1], written, flags=re.DOTALL)


def _string(node: Any, shell: Shell, is_quoted: bool) -> Parts:
    found = within(node, shell, start=node.start_byte + 1, end=node.end_byte - 1)
    return found if found or "[@]" in source(node) or source(node) == '"$@"' else [literal("")]


def within(node: Any, shell: Shell, *, start: int, end: int) -> Parts:
    """Return the parts of a text between two bytes of the file, in which only expansions are syntax nodes.

    The grammar has no nodes for some pieces of text, so those are read from the gaps between the expansions.
    """
    found: Parts = []
    place = start
    for child in node.children:
        if child.type not in _EXPANSIONS:
            continue
        found += [*_gap(node, place, child.start_byte), *parts(child, shell, is_quoted=True)]
        place = child.end_byte
    return [*found, *_gap(node, place, end)]


def _gap(node: Any, start: int, end: int) -> Iterator[Part]:
    if start < end:
        written = node.text[start - node.start_byte : end - node.start_byte].decode(errors="replace")
        yield literal(re.sub(r'\\(["\\$`\n])', lambda found: "" if found[1] == "\n" else found[1], written))


def _concatenation(node: Any, shell: Shell, is_quoted: bool) -> Parts:
    return [part for child in node.children for part in parts(child, shell, is_quoted=is_quoted)]


def _raw(node: Any, shell: Shell, is_quoted: bool) -> Parts:
    return [literal(source(node)[1:-1])]


def _simple(node: Any, shell: Shell, is_quoted: bool) -> Parts:
    name = source(node).removeprefix("$")
    if name in "@*":
        return _elements(list(shell.arguments))
    return [Part(text=_value(name, shell), is_quoted=is_quoted)]


def _expansion(node: Any, shell: Shell, is_quoted: bool) -> Parts:
    """Expand ``${NAME}``, ``${NAME:-default}``, ``${NAME[@]}`` and their relatives."""
    inner = [child for child in node.children if child.type not in ("${", "}")]
    if not inner or inner[0].type not in ("variable_name", "subscript", "special_variable_name"):
        return [_unknown(node, is_quoted)]
    target, rest = inner[0], inner[1:]
    if target.type == "subscript":
        name, index = (source(child) for child in target.named_children[:2])
        if index in "@*":
            is_set = bool(shell.arrays.get(name)) or name in shell.scalars
            operation = source(rest[0]) if rest else ""
            if not rest or (is_set and operation in ("-", ":-")):
                return _array(name, shell, is_quoted, node)
            if operation in ("+", ":+"):
                return [part for each in rest[1:] if is_set for part in parts(each, shell, is_quoted=is_quoted)]
        value = _element(name, index, shell)
    else:
        value = _value(source(target), shell)
    if not rest:
        return [Part(text=value, is_quoted=is_quoted)]
    found = _modified(value, rest, node, shell)
    if source(rest[0]) in (":=", "=") and target.type == "variable_name":
        shell.set(source(target), found)
    return [Part(text=found, is_quoted=is_quoted)]


def _modified(value: Text, rest: list[Any], node: Any, shell: Shell) -> Text:
    """Apply an operator such as ``:-`` or ``%`` and its word to the value of a variable."""
    operation, operand = source(rest[0]), [text(each, shell) for each in rest[1:]]
    word = joined(literal("") if each is None else Part(text=each, is_quoted=True) for each in operand)
    is_unset = bool(value.unset)
    if operation in (":-", "-", ":=", "="):
        is_missing = is_unset or (operation[0] == ":" and value.is_known and not value.value)
        return word if is_missing else value
    if operation in (":+", "+"):
        return Text(value="") if is_unset or (operation == ":+" and not value.value) else word
    if operation in (":?", "?"):
        return value
    if operation in ("%", "%%", "#", "##") and value.is_known and word.is_known:
        return Text(value=_trimmed(value.value, operation, word.value))
    return _unknown(node, True).text


def _trimmed(value: str, operation: str, pattern: str) -> str:
    """Remove the shortest or longest part at one end of ``value`` that matches a pattern of bash."""
    places = range(len(value) + 1)
    is_end, is_longest = operation[0] == "%", len(operation) == 2
    for place in places if is_end == is_longest else reversed(places):
        removed, kept = (value[place:], value[:place]) if is_end else (value[:place], value[place:])
        if fnmatch.fnmatchcase(removed, pattern):
            return kept
    return value


def _value(name: str, shell: Shell) -> Text:
    if name in ("0", "BASH_SOURCE"):
        return Text(value=str(shell.script if name == "0" else shell.file))
    if name.isdigit() and 0 < int(name) <= len(shell.arguments):
        return shell.arguments[int(name) - 1]
    if name in shell.arrays:
        shell.used_arrays.add(name)
        return next(iter(shell.arrays[name]), Text(value=""))
    return shell.scalars.get(name, Text(value=f"${name}", unset=(name,)))


def _array(name: str, shell: Shell, is_quoted: bool, node: Any) -> Parts:
    if name not in shell.arrays:
        if name in shell.scalars:
            return [Part(text=shell.scalars[name], is_quoted=is_quoted)]
        text = f"the script does not set the array {name}, so it adds no words here"
        shell.unset_arrays.setdefault(name, Note(place=shell.place(node), text=text))
        return []
    shell.used_arrays.add(name)
    return _elements(shell.arrays[name])


def _elements(values: list[Text]) -> Parts:
    # Elements with white space stay whole, also without quotes: bash would split them, which no script means.
    found: Parts = []
    for value in values:
        found += [Break(), Part(text=value, is_quoted=True)]
    return found[1:]


def _element(name: str, index: str, shell: Shell) -> Text:
    if name == "BASH_SOURCE":
        return Text(value=str(shell.file))
    values = shell.arrays.get(name, [])
    shell.used_arrays.add(name)
    if index.isdigit() and int(index) < len(values):
        return values[int(index)]
    return Text(value=f"${{{name}[{index}]}}", unset=(name,))


def _substitution(node: Any, shell: Shell, is_quoted: bool) -> Parts:
    """Expand ``$(...)`` if it names folders, quotes a text or counts; any other command is unknown."""
    inner = [child for child in node.named_children if child.type != "comment"]
    found = _output(inner[0], shell) if len(inner) == 1 else None
    return [_unknown(node, is_quoted) if found is None else Part(text=found, is_quoted=is_quoted)]


def _output(node: Any, shell: Shell) -> Text | None:
    """Return the output of a command that needs no run, or None."""
    heredoc = next((child for child in node.children if child.type == "heredoc_redirect"), None)
    if heredoc is not None:
        return _document(heredoc, shell) if source(node).startswith("cat") else None
    if node.type == "redirected_statement":
        return _output(node.children[0], shell)
    if node.type == "list":
        first, last = node.named_children[0], node.named_children[-1]
        return _changed_folder(first, shell) if source(last) in ("pwd", "pwd -P") else None
    return _command_output(node, shell) if node.type == "command" else None


def _document(redirect: Any, shell: Shell) -> Text | None:
    start, body = (
        next((child for child in redirect.children if child.type == kind), None)
        for kind in ("heredoc_start", "heredoc_body")
    )
    if start is None or body is None:
        return None
    if source(start)[:1] in "'\"\\":
        return Text(value=source(body).rstrip("\n"))
    found = joined(within(body, shell, start=body.start_byte, end=body.end_byte))
    return dataclasses.replace(found, value=found.value.rstrip("\n"))


def _changed_folder(node: Any, shell: Shell) -> Text | None:
    node = node.children[0] if node.type == "redirected_statement" else node
    given = [each.value for each in _arguments(node, shell) if each.is_known]
    if given[:1] != ["cd"] or len(given) < 2:
        return None
    return Text(value=os.path.normpath(shell.script.parent / given[-1]))


def _command_output(node: Any, shell: Shell) -> Text | None:
    given = _arguments(node, shell)
    if len(given) < 2 or not all(each.is_known for each in given):
        return None
    name, path = given[0].value, given[-1].value
    if name == "seq":
        return _sequence([each.value for each in given[1:]])
    if name in ("realpath", "readlink"):
        return Text(value=os.path.normpath(shell.script.parent / path))
    return {
        "dirname": Text(value=os.path.dirname(path.rstrip("/") or "/") or "."),
        "basename": Text(value=Path(path).name),
        "echo": Text(value=" ".join(each.value for each in given[1:])),
    }.get(name)


def _sequence(given: list[str]) -> Text | None:
    """Return the output of ``seq`` with whole numbers: LAST, FIRST LAST, or FIRST STEP LAST."""
    if len(given) > 3 or not all(re.fullmatch(r"[+-]?[0-9]{1,18}", each) for each in given):
        return None
    numbers = [int(each) for each in given]
    first, step, last = numbers[0] if len(given) > 1 else 1, numbers[1] if len(given) > 2 else 1, numbers[-1]
    if step == 0:
        return None
    found = range(first, last + (1 if step > 0 else -1), step)
    return Text(value="\n".join(map(str, found))) if len(found) <= _MOST_NUMBERS else None


_MOST_NUMBERS = 10_000
"""The maximum number of words of one ``seq``; slime's scripts have 31."""


def _arguments(node: Any, shell: Shell) -> list[Text]:
    return [word for child in node.named_children for word in words(child, shell)]


def _arithmetic(node: Any, shell: Shell, is_quoted: bool) -> Parts:
    value = number(source(node).removeprefix("$((").removesuffix("))"), shell)
    return [_unknown(node, is_quoted) if value is None else literal(str(value))]


def number(written: str, shell: Shell) -> int | None:
    """Return the value of an arithmetic expression of whole numbers, or None if it is unknown."""

    def replaced(found: re.Match[str]) -> str:
        return shell.scalars.get(found[1], Text(value="?")).value

    expression = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", replaced, written).strip()
    if not re.fullmatch(r"[\d\s+*/%()-]{1,200}", expression):
        return None
    try:
        return _computed(ast.parse(expression, mode="eval").body)
    except (KeyError, SyntaxError, ValueError, ZeroDivisionError):
        return None


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _computed(tree: ast.expr) -> int:
    if isinstance(tree, ast.Constant) and type(tree.value) is int:
        return tree.value
    if isinstance(tree, ast.BinOp):
        return _OPERATORS[type(tree.op)](_computed(tree.left), _computed(tree.right))
    raise ValueError(ast.dump(tree))


def _unknown(node: Any, is_quoted: bool) -> Part:
    written = " ".join(source(node).split())
    return Part(text=Text(value=written, unknown=(written,)), is_quoted=is_quoted)


def _commands_output(node: Any, shell: Shell, is_quoted: bool) -> Parts:
    return [_unknown(node, is_quoted)]


_PARTS: dict[str, Callable[[Any, Shell, bool], Parts]] = {
    "arithmetic_expansion": _arithmetic,
    "command_name": _concatenation,
    "command_substitution": _substitution,
    "concatenation": _concatenation,
    "expansion": _expansion,
    "process_substitution": _commands_output,
    "raw_string": _raw,
    "simple_expansion": _simple,
    "string": _string,
}
_EXPANSIONS = ("arithmetic_expansion", "command_substitution", "expansion", "simple_expansion")


def array(node: Any, shell: Shell) -> Iterator[Text]:
    """Yield the elements of an array's literal.  Comments in it are not elements."""
    for child in node.named_children:
        if child.type != "comment":
            yield from words(child, shell)
