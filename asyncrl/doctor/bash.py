"""The reading of a launch script, statement by statement, without running anything.

Assignments, arrays, files that are sourced, functions and conditions on variables are followed.  A condition that
depends on a command counts as false, and is reported.
"""

import difflib
import fnmatch
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.doctor.conditions import holds
from asyncrl.doctor.expand import array, source, text, words
from asyncrl.doctor.shell import Command, Note, Shell
from asyncrl.doctor.words import Text
from asyncrl.errors import DataError

_MOST_TURNS = 64
"""The maximum number of words of a ``for`` loop that are followed one by one."""
_MOST_STATEMENTS = 100_000
"""The maximum number of statements; slime's scripts have some hundred."""
_MOST_FILES = 32
"""The maximum depth of files and functions; a deeper script calls itself."""


def read_script(path: Path, given: Mapping[str, str]) -> Shell:
    """Read a script with the variables ``given``.  Raises DataError if it cannot be read."""
    script = Path(os.path.abspath(path))
    shell = Shell(script=script, scalars={name: Text(value=value) for name, value in given.items()})
    try:
        code = script.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    _read(script, code, shell)
    _judge_unset_arrays(shell)
    return shell


def _judge_unset_arrays(shell: Shell) -> None:
    """Report the arrays that are not set: as mistakes if another array is set for nothing, so its words are lost."""
    unused = sorted(shell.arrays.keys() - shell.used_arrays)
    for name, note in shell.unset_arrays.items():
        if unused:
            lost = ", ".join(difflib.get_close_matches(name, unused, n=1) or unused)
            shell.mistakes.append(replace(note, text=f"{note.text}; the words of {lost} are used nowhere"))
        else:
            shell.notes.append(note)


def _read(file: Path, code: bytes, shell: Shell) -> None:
    tree = _parsed(code)
    shell.files.append(file)
    if tree.has_error:
        shell.note(tree, "a part of this file is not valid bash, and may be read wrongly")
    _block(tree.children, shell)
    shell.files.pop()


def _parsed(code: bytes) -> Any:
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise DataError(f"{error}; install the extra: asyncrl[doctor]") from error
    language = tree_sitter.Language(tree_sitter_bash.language())
    return tree_sitter.Parser(language).parse(_LAYER_PATTERN.sub(rb"${\1}", code)).root_node


_LAYER_PATTERN = re.compile(rb"(?<=\]\*)\$(\w+)")
"""A variable in a pattern of layers, ``[0]*$DENSE+[1]*$SPARSE``: the grammar ends the word before its name."""


def _block(nodes: list[Any], shell: Shell) -> None:
    for node in nodes:
        shell.num_statements += 1
        if shell.num_statements > _MOST_STATEMENTS:
            raise DataError(f"{shell.script}: more than {_MOST_STATEMENTS:,} statements, loops and functions included")
        handler = _STATEMENTS.get(node.type)
        if handler is not None:
            handler(node, shell)


def _children(node: Any, shell: Shell) -> None:
    _block(node.children, shell)


def _assignment(node: Any, shell: Shell) -> None:
    name, value = node.named_children[0], node.child_by_field_name("value")
    is_appended = any(child.type == "+=" for child in node.children)
    if name.type == "subscript":
        _element(node, name, shell, is_appended=is_appended)
    elif value is not None and value.type == "array":
        before = shell.arrays.get(source(name), []) if is_appended else []
        shell.arrays[source(name)] = [*before, *array(value, shell)]
    else:
        found = Text(value="") if value is None else text(value, shell)
        shell.set(source(name), found, is_appended=is_appended)


def _element(node: Any, subscript: Any, shell: Shell, *, is_appended: bool) -> None:
    """Assign one element of an array; without a known number of an element, the whole array is unknown."""
    name, index = (source(child) for child in subscript.named_children[:2])
    value, elements = node.child_by_field_name("value"), shell.arrays.get(name)
    if elements is None or value is None or is_appended or not index.isdecimal() or int(index) > len(elements):
        shell.forget(name, source(node))
    else:
        elements[int(index) : int(index) + 1] = [text(value, shell)]


def _declaration(node: Any, shell: Shell) -> None:
    """Read ``export``, ``declare``, ``local`` and ``readonly``."""
    is_exported = source(node.children[0]) == "export"
    for child in node.named_children:
        name = source(child.named_children[0]) if child.type == "variable_assignment" else source(child)
        if child.type == "variable_assignment":
            _assignment(child, shell)
        if is_exported and name in shell.scalars:
            shell.exported[name] = shell.scalars[name]


def _command(node: Any, shell: Shell) -> None:
    assignments = [child for child in node.named_children if child.type == "variable_assignment"]
    name = node.child_by_field_name("name")
    if name is None:
        return
    environment = {source(each.named_children[0]): _given(each, shell) for each in assignments}
    rest = node.named_children[node.named_children.index(name) + 1 :]
    command = Command(
        words=(*words(name, shell), *(word for child in rest for word in words(child, shell))),
        environment=environment,
        place=shell.place(node),
    )
    first = command.words[0].value if command.words else ""
    if first in shell.functions and len(shell.files) < _MOST_FILES:
        with shell.assigned(environment):
            _call(shell.functions[first], command.words[1:], shell)
    elif (builtin := _BUILTINS.get(first)) is not None:
        with shell.assigned(environment):  # MODEL_ARGS_ROTARY_BASE=5000000 source qwen3-4B.sh
            builtin(node, command, shell)
    else:
        if first.startswith("--"):
            text = f"a command begins with {first}: the line before it is a comment, or does not end with a backslash"
            shell.mistakes.append(Note(place=shell.place(node), text=text))
        shell.commands.append(command)


def _given(assignment: Any, shell: Shell) -> Text:
    value = assignment.child_by_field_name("value")
    return Text(value="") if value is None else text(value, shell)


def _call(body: Any, arguments: tuple[Text, ...], shell: Shell) -> None:
    before, shell.arguments = shell.arguments, arguments
    shell.files.append(shell.file)  # limits the depth of calls
    _children(body, shell)
    shell.files.pop()
    shell.arguments = before


def _sourced(node: Any, command: Command, shell: Shell) -> None:
    """Read a file that the script includes."""
    if len(command.words) < 2:
        return
    path = command.words[1]
    if not path.is_known:
        shell.note(node, f"{path.value} is not read, because its name is unknown")
        return
    file = shell.located(path.value)
    if file is None or not os.path.isfile(file):
        shell.missing_files.append(f"{command.place}: no such file: {path.value}")
    elif len(shell.files) < _MOST_FILES:
        _read(file, file.read_bytes(), shell)


def _printf(node: Any, command: Command, shell: Shell) -> None:
    given = [word.value for word in command.words]
    if given[1:2] == ["-v"] and len(given) > 2:
        shell.forget(given[2], " ".join(source(node).split()))


def _unset(node: Any, command: Command, shell: Shell) -> None:
    for word in command.words[1:]:
        for table in (shell.scalars, shell.arrays, shell.exported):
            table.pop(word.value, None)


def _exit(node: Any, command: Command, shell: Shell) -> None:
    shell.note(node, "the script may end here (exit); the rest is read as well")


def _evaluated(node: Any, command: Command, shell: Shell) -> None:
    shell.note(node, f"'{' '.join(source(node).split())}' is not followed")


_BUILTINS: Mapping[str, Callable[[Any, Command, Shell], None]] = {
    ".": _sourced,
    "eval": _evaluated,
    "exit": _exit,
    "printf": _printf,
    "source": _sourced,
    "unset": _unset,
}


def _if(node: Any, shell: Shell) -> None:
    """Read the branch that is taken.  A condition on a command counts as false."""
    condition, body = _split_if(node)
    value = holds(condition, shell) if condition is not None else None
    if value is None and condition is not None:
        shell.note(node, f"assumed to be false: {' '.join(source(condition).split())}")
    if value:
        _block(body, shell)
        return
    for clause in (child for child in node.children if child.type in ("elif_clause", "else_clause")):
        if clause.type == "else_clause":
            _children(clause, shell)
            return
        inner, inside = _split_if(clause)
        if inner is not None and holds(inner, shell):
            _block(inside, shell)
            return


def _split_if(node: Any) -> tuple[Any, list[Any]]:
    """Return the condition of an ``if`` or ``elif``, and the statements behind its ``then``."""
    then = next(place for place, child in enumerate(node.children) if child.type == "then")
    conditions = [child for child in node.children[:then] if child.is_named]
    body = [child for child in node.children[then + 1 :] if child.type not in ("elif_clause", "else_clause")]
    return (conditions[-1] if conditions else None), body


def _for(node: Any, shell: Shell) -> None:
    name, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
    values = [word for child in node.children_by_field_name("value") for word in words(child, shell)]
    if name is None or body is None:
        return
    if not values or len(values) > _MOST_TURNS or not all(value.is_known for value in values):
        values = [Text(value=f"${source(name)}", unknown=(f"the loop over {source(name)}",))]
    for value in values:
        shell.set(source(name), value)
        _children(body, shell)


def _loop(node: Any, shell: Shell) -> None:
    """Mark every variable that a loop assigns as unknown, because the number of turns is unknown."""
    for each in _assignments(node):
        name = each.named_children[0]
        name = name.named_children[0] if name.type == "subscript" else name
        shell.forget(source(name), f"the loop in line {node.start_point[0] + 1}")


def _compound(node: Any, shell: Shell) -> None:
    """Read ``{ ... }``; the variables that ``(( ... ))`` sets are unknown."""
    if node.children and node.children[0].type == "((":
        for name in _computed_names(node):
            shell.forget(name, " ".join(source(node).split()))
    else:
        _children(node, shell)


def _computed_names(node: Any) -> list[str]:
    signs = [child.type for child in node.children if not child.is_named]
    here = [source(child) for child in node.children if child.type == "variable_name"]
    is_set = any(re.fullmatch(r"\+\+|--|[-+*/%&|^]?=|(<<|>>)=", sign) for sign in signs)
    return (here[:1] if is_set else []) + [name for child in node.children for name in _computed_names(child)]


def _assignments(node: Any) -> list[Any]:
    here = [node] if node.type == "variable_assignment" else []
    return here + [found for child in node.children for found in _assignments(child)]


def _list(node: Any, shell: Shell) -> None:
    """Read ``a && b`` and ``a || b``: b counts unless the value of ``a`` excludes it."""
    left, right = node.named_children[0], node.named_children[-1]
    is_or = any(child.type == "||" for child in node.children)
    _block([left], shell)
    value = holds(left, shell)
    is_read = value is False if is_or else value is not False and (value or left.type != "test_command")
    if is_read:
        _block([right], shell)
    elif value is None and _may_matter(right, shell):
        shell.note(node, f"not read, because the condition is unknown: {' '.join(source(node).split())}")


def _may_matter(node: Any, shell: Shell) -> bool:
    """Whether a statement may change what the training command gets; most others make folders or end the script."""
    name = node.child_by_field_name("name") if node.type == "command" else None
    return name is None or source(name) in ("source", ".", *shell.functions)


def _case(node: Any, shell: Shell) -> None:
    value = text(node.child_by_field_name("value"), shell)
    if not value.is_known:
        shell.note(node, f"no branch of 'case {value.value}' is read")
        return
    for item in (child for child in node.children if child.type == "case_item"):
        patterns = [source(pattern) for pattern in item.children_by_field_name("value")]
        if any(fnmatch.fnmatchcase(value.value, pattern) for pattern in patterns):
            _block(item.children, shell)
            return


def _function(node: Any, shell: Shell) -> None:
    shell.functions[source(node.child_by_field_name("name"))] = node.child_by_field_name("body")


_STATEMENTS: Mapping[str, Callable[[Any, Shell], None]] = {
    "c_style_for_statement": _loop,
    "case_statement": _case,
    "command": _command,
    "compound_statement": _compound,
    "declaration_command": _declaration,
    "do_group": _children,
    "for_statement": _for,
    "function_definition": _function,
    "if_statement": _if,
    "list": _list,
    "negated_command": _children,
    "pipeline": _children,
    "redirected_statement": _children,
    "subshell": _children,
    "variable_assignment": _assignment,
    "variable_assignments": _children,
    "while_statement": _loop,
}
