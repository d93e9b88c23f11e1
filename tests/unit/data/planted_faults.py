"""A generator of prompt rows with planted faults, from a seed."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

GOOD, LONG, BLANK = "prompt", "too long", "no row"
"""Outcomes of a line; any other outcome is the beginning of the fault's text."""

MIB = 2**20


@dataclass(frozen=True)
class Planted:
    """A line and its outcome."""

    line: bytes
    outcome: str
    label: object = None


def row(question: object = "one two", answer: object = 7, **more: object) -> bytes:
    return json.dumps({"question": question, "answer": answer, **more}, ensure_ascii=False).encode()


def raw(question: bytes) -> bytes:
    """A row with the bytes of a prompt as they are."""
    return b'{"question": ' + question + b', "answer": 7}'


def nested(depth: int) -> bytes:
    return b'{"question": "one", "answer": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


QUESTION = 'key "question"'
TYPES = f"{QUESTION} must be text or a list of messages, got"
MESSAGE = f"{QUESTION}, message 0 must be an object with role and content"
METADATA, TOOLS = 'key "metadata"', 'key "tools"'

HANDLED: list[Planted] = [
    Planted(row(answer=None), GOOD, None),
    Planted(row(answer=[1, {"a": None}]), GOOD, [1, {"a": None}]),
    Planted(row("one " + "\u00e9\U0001f600" * 5), GOOD, 7),
    Planted(raw(b'"one \\u0000 two"'), GOOD, 7),
    Planted(b'{"question": "three", "question": "one", "answer": 1, "answer": 2}', GOOD, 2),  # the last one counts
    Planted(b"  " + row() + b"  \r", GOOD, 7),
    Planted(row(metadata='{"a": 1}'), GOOD, 7),
    Planted(row(metadata=None, tools=None), GOOD, 7),
    Planted(row(metadata="", tools="[]"), GOOD, 7),
    Planted(row([{"role": "user", "content": "one"}]), GOOD, 7),
    Planted(nested(100), GOOD),
    Planted(b"", BLANK),
    Planted(b" \t \r", BLANK),
    Planted(row("one " * 50), LONG),
]
FAULTS: list[Planted] = [
    Planted(b'{"answer": 1}', f"{QUESTION} is missing; the row has: answer"),
    Planted(b'{"question": "one"}', 'key "answer" is missing; the row has: question'),
    Planted(b"{}", f"{QUESTION} is missing; the row has: nothing"),
    Planted(row(3), f"{TYPES} a number"),
    Planted(row(1.5), f"{TYPES} a number"),
    Planted(row(None), f"{TYPES} null"),
    Planted(row(True), f"{TYPES} true"),
    Planted(row({"a": 1}), f"{TYPES} an object"),
    Planted(row(""), f"{QUESTION} is empty"),
    Planted(row([]), f"{QUESTION} is empty"),
    Planted(row("  "), f"{QUESTION} has no tokens"),
    Planted(row(["one"]), MESSAGE),
    Planted(row([[{"role": "user", "content": "one"}]]), MESSAGE),
    Planted(row([{"role": "user"}]), MESSAGE),
    Planted(row([{"role": 3, "content": "one"}]), MESSAGE),
    Planted(row([{"role": None, "content": "one"}]), MESSAGE),
    Planted(row([{"role": "system", "content": "one"}]), "the chat template refuses the messages: no system"),
    Planted(row(metadata=3), f"{METADATA} must be an object, got a number"),
    Planted(row(metadata=[1]), f"{METADATA} must be an object, got a list"),
    Planted(row(metadata="{"), f"{METADATA}: its text is not JSON"),
    Planted(row(metadata="3"), f"{METADATA} must be an object, got a number in its text"),
    Planted(row(tools="search"), f"{TOOLS}: its text is not JSON"),
    Planted(row(tools={"a": 1}), f"{TOOLS} must be a list, got an object"),
    Planted(raw(b'"one \xff two"'), "not JSON: "),
    Planted(raw(b'"one \xc3"'), "not JSON: "),
    Planted(raw(b'"\xed\xa0\x80"'), "not JSON: "),
    Planted(raw(b'"one \\ud800 two"'), "not JSON: "),
    Planted(raw(b'"one \\udc00\\ud800"'), "not JSON: "),
    Planted(raw(b'"one \0 two"'), "not JSON: "),
    Planted(raw(b'"one \x01 two"'), "not JSON: "),
    Planted(row().decode().encode("utf-16-le"), "not JSON: "),
    Planted(row().decode().encode("utf-16-be"), "not JSON: "),
    Planted("\ufeff".encode() + row(), "not JSON: "),
    Planted(b"\0" * 50, "not JSON: "),
    Planted(row()[:-1], "not JSON: unexpected end of data"),
    Planted(row()[:20], "not JSON: "),
    Planted(row() + b",", "not JSON: "),
    Planted(row() + row(), "not JSON: "),
    Planted(b"{'question': 'one', 'answer': 1}", "not JSON: "),
    Planted(raw(b"NaN"), "not JSON: "),
    Planted(raw(b"1e999"), "not JSON: "),
    Planted(b"question,answer", "not JSON: "),
    Planted(b"3", "must be a JSON object, got a number"),
    Planted(b'"one"', "must be a JSON object, got text"),
    Planted(b"null", "must be a JSON object, got null"),
    Planted(b"[" + row() + b"]", "must be a JSON object, got a list"),
    Planted(nested(102), "lists and objects are nested more than 100 levels deep"),
    Planted(nested(900), "lists and objects are nested more than 100 levels deep"),
    Planted(nested(100_000), "not JSON: "),
]
HUGE: list[Callable[[], Planted]] = [
    lambda: Planted(row(image="x" * 20 * MIB), GOOD, 7),
    lambda: Planted(row(metadata={"x": "y" * 10 * MIB}), GOOD, 7),
    lambda: Planted(row("one " * 500_000), LONG),
    lambda: Planted(row("x" * 65 * MIB), "the row has more than 64 MiB"),
]


def planted_lines(num_lines: int, seed: int) -> list[Planted]:
    """Return lines in which every fault occurs, one in three lines is no plain row, and the first row is plain."""
    draws = random.Random(seed)
    lines = [Planted(row(answer=number), GOOD, number) for number in range(num_lines)]
    places = draws.sample(range(1, num_lines), num_lines // 3)
    special = [*FAULTS, *HANDLED, *(make() for make in HUGE)]
    while len(special) < len(places):
        special.append(draws.choice([*FAULTS, *HANDLED]))
    for place, planted in zip(places, special, strict=True):
        lines[place] = planted
    return lines


def joined(lines: list[Planted], seed: int) -> bytes:
    """Return the file: line ends of both kinds, a byte order mark at the start, and none at the end."""
    draws = random.Random(seed)
    ends = [draws.choice([b"\n", b"\r\n"]) for _ in lines[1:]] + [b""]
    return b"\xef\xbb\xbf" + b"".join(line.line + end for line, end in zip(lines, ends, strict=True))
