"""One sample token by token: its parts, and the colour and the numbers of each token."""

import math
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from asyncrl.data.token_texts import TokenText
from asyncrl.types import FIRST_ARTIFICIAL_CALL

PAGE_TOKENS = 4_000
"""Tokens on a page: their HTML takes 1 MB."""
VERSION_COLOURS = 8
"""Colours of versions; the ninth version has the colour of the first, and each change is marked in the text as well."""
LOGPROB_EDGES = (-8.0, -4.0, -2.0, -1.0, -0.5, -0.1, -0.01)
"""Edges of the colours in nat: probabilities of 0.03 %, 2 %, 14 %, 37 %, 61 %, 90 % and 99 %."""
DIFFERENCE_EDGES = (-1.0, -0.2, -0.05, -0.01, 0.01, 0.05, 0.2, 1.0)
ADVANTAGE_EDGES = (-2.0, -1.0, -0.5, -1e-6, 1e-6, 0.5, 1.0, 2.0)

type Key = tuple[str, str]
"""A class of the style sheet, and what its colour stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token, as it is shown."""

    position: int
    id: int
    text: str
    style: str
    """Classes of the style sheet."""
    mark: str = ""
    """Shown before the token: a version that begins, or a resumption."""
    engine: str = ""
    trainer: str = ""
    difference: str = ""
    advantage: str = ""
    version: str = ""
    use: str = ""

    @property
    def title(self) -> str:
        """All numbers, for the pointer."""
        numbers = {"engine": self.engine, "trainer": self.trainer, "difference": self.difference}
        given = [f"{name} {value}" for name, value in (numbers | {"advantage": self.advantage}).items() if value]
        return ", ".join([f"token {self.position}, id {self.id}", *given, *filter(None, (self.version, self.use))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive tokens of one kind: a turn, an observation, or the whole response."""

    kind: str
    title: str
    tokens: Sequence[Token]


class TokenView:
    """The response of one row of a file of samples."""

    def __init__(self, row: Mapping[str, Any], texts: Sequence[TokenText] | None) -> None:
        """``texts`` has the text of each response token; None if the tokenizer is unknown."""
        self._row = row
        self._texts = texts
        self._versions = [(span["version"], span["step"]) for span in row["spans"]]
        self._order = {version: place for place, version in enumerate(sorted(set(self._versions)))}

    def __len__(self) -> int:
        """Return the number of response tokens."""
        return len(self._row["tokens"])

    def parts(self, colour: str, start: int, stop: int) -> Iterator[Part]:
        """Yield the tokens ``start`` to ``stop`` (exclusive) by turn."""
        style = COLOURS[colour].style
        for kind, title, first, last in self._regions():
            places = range(max(first, start), min(last, stop))
            if places:
                yield Part(kind=kind, title=title, tokens=[self._token(place, kind, style) for place in places])

    def marks(self, start: int, stop: int) -> list[str]:
        """Return what begins at the tokens ``start`` to ``stop`` (exclusive): other versions, and a resumption."""
        places = {span["start"] for span in self._row["spans"]} | {self._row["resumed_at"]}
        found = [mark for place in sorted(places) if start <= place < stop for mark in self._marks(place)]
        return list(dict.fromkeys(found))

    def legend(self, colour: str) -> Sequence[Key]:
        """Return the meaning of each colour."""
        return COLOURS[colour].legend(self)

    def version_keys(self) -> list[Key]:
        """Return the colours of the versions, the oldest first."""
        return [
            (f"v{place % VERSION_COLOURS}", f"version {version} (lag {self._row['step'] - step})")
            for (version, step), place in self._order.items()
        ]

    def number(self, column: str, place: int) -> float | None:
        """Return a token's number; None if it is unknown."""
        values = self._row[column]
        number = None if values is None else values[place]
        return None if number is None or not math.isfinite(number) else number

    def difference(self, place: int) -> float | None:
        """Return the trainer's log-prob minus the engine's."""
        trainer, engine = self.number("trainer_logprobs", place), self.number("logprobs", place)
        return None if trainer is None or engine is None else trainer - engine

    def version_place(self, place: int) -> int | None:
        """Return the position of a token's version among those of the sample; None for an observation."""
        span = self._span_of[place]
        return None if span is None else self._order[self._versions[span]]

    def is_trained(self, place: int) -> bool:
        """Whether a token is in the loss."""
        return bool(self._row["loss_mask"][place])

    @cached_property
    def _span_of(self) -> list[int | None]:
        found: list[int | None] = [None] * len(self)
        for number, span in enumerate(self._row["spans"]):
            found[span["start"] : span["stop"]] = [number] * (span["stop"] - span["start"])
        return found

    def _regions(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield kind, title, start and stop of all parts."""
        end = 0
        for number, turn in enumerate(self._row["turns"], 1):
            if turn["start"] > end:
                yield "observation", _observation_title(turn["start"] - end), end, turn["start"]
            end = turn["stop"]
            yield "turn", _turn_title(number, turn), turn["start"], end
        if end < len(self):
            is_rest = bool(self._row["turns"])
            title = _observation_title(len(self) - end) if is_rest else f"Response, ended by {self._row['finish']}"
            yield ("observation" if is_rest else "response"), title, end, len(self)

    def _token(self, place: int, kind: str, style: Callable[["TokenView", int], str]) -> Token:
        text = None if self._texts is None else self._texts[place]
        is_observation = kind == "observation"
        classes = ["t", "" if is_observation else style(self, place)]
        classes += ["special"] if text is not None and text.is_special else []
        classes += ["bytes"] if text is not None and text.is_part else []
        classes += [] if self.is_trained(place) or is_observation else ["unused"]
        span = self._span_of[place]
        version, step = (None, 0) if span is None else self._versions[span]
        token_id = self._row["tokens"][place]
        return Token(
            position=place,
            id=token_id,
            text=f"{token_id} " if text is None else visible(text.text),
            style=" ".join(filter(None, classes)),
            mark=self._mark(place),
            engine="" if is_observation else _shown(self.number("logprobs", place)),
            trainer="" if is_observation else _shown(self.number("trainer_logprobs", place)),
            difference="" if is_observation else _shown(self.difference(place)),
            advantage=_shown(self.number("advantages", place)) if self.is_trained(place) else "",
            version="" if version is None else f"version {version} (lag {self._row['step'] - step})",
            use="observation" if is_observation else "in the loss" if self.is_trained(place) else "not in the loss",
        )

    def _mark(self, place: int) -> str:
        return " ".join(self._marks(place))

    def _marks(self, place: int) -> list[str]:
        """Return what begins at a token: a resumption, or another version."""
        marks = ["resumed"] if 0 < self._row["resumed_at"] == place else []
        span = self._span_of[place]
        if span is not None and len(self._order) > 1 and self._row["spans"][span]["start"] == place:
            marks.append(f"v{self._versions[span][0]}")
        return marks


@dataclass(frozen=True, slots=True)
class Colour:
    """One choice of what the colours stand for."""

    title: str
    style: Callable[[TokenView, int], str]
    """Return the class of a token."""
    legend: Callable[[TokenView], Sequence[Key]]


def _version_style(view: TokenView, place: int) -> str:
    version = view.version_place(place)
    return "" if version is None else f"v{version % VERSION_COLOURS}"


def _mask_style(view: TokenView, place: int) -> str:
    return "v0" if view.is_trained(place) else ""


def _scaled(
    title: str, letter: str, edges: Sequence[float], number: Callable[[TokenView, int], float | None]
) -> Colour:
    """Return colours for the stretches between ``edges``."""

    def style(view: TokenView, place: int) -> str:
        value = number(view, place)
        return "missing" if value is None else f"{letter}{bisect_right(edges, value)}"

    texts = [f"below {edges[0]:g}", *map(_stretch, edges[:-1], edges[1:]), f"from {edges[-1]:g}"]
    keys = [(f"{letter}{place}", text) for place, text in enumerate(texts)]
    return Colour(title, style, lambda view: [*keys, ("missing", "unknown")])


def _stretch(low: float, high: float) -> str:
    return "0" if high == -low and high < 1e-3 else f"{_edge(low)} to {_edge(high)}"


def _edge(value: float) -> str:
    return f"{0.0 if abs(value) < 1e-3 else value:g}"


def _advantage(view: TokenView, place: int) -> float | None:
    return view.number("advantages", place) if view.is_trained(place) else None


COLOURS: Mapping[str, Colour] = {
    "version": Colour("version", _version_style, TokenView.version_keys),
    "mask": Colour("mask", _mask_style, lambda view: [("v0", "in the loss"), ("unused", "not in the loss")]),
    "logprob": _scaled("log-prob", "s", LOGPROB_EDGES, lambda view, place: view.number("logprobs", place)),
    "difference": _scaled("trainer minus engine", "d", DIFFERENCE_EDGES, TokenView.difference),
    "advantage": _scaled("advantage", "d", ADVANTAGE_EDGES, _advantage),
}


def prompt_tokens(ids: Sequence[int], texts: Sequence[TokenText] | None) -> list[Token]:
    """Return the tokens of a prompt."""
    return [
        Token(
            position=place - len(ids),
            id=number,
            text=f"{number} " if texts is None else visible(texts[place].text),
            style="t special" if texts is not None and texts[place].is_special else "t",
            use="prompt",
        )
        for place, number in enumerate(ids)
    ]


def visible(text: str) -> str:
    """Return ``text`` with signs for line breaks, tabs, control characters and tokens of nothing but spaces."""
    if text and not text.strip(" "):
        return "·" * len(text)
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in "\n\r\t":
        return {"\n": "⏎\n", "\r": "␍", "\t": "⇥\t"}[character]
    if ord(character) < 32:
        return chr(0x2400 + ord(character))
    if unicodedata.category(character) in {"Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn"}:
        return f"⟨U+{ord(character):04X}⟩"
    return character


def _shown(number: float | None) -> str:
    return "" if number is None else f"{number:.4f}"


def _turn_title(number: int, turn: Mapping[str, Any]) -> str:
    call = (
        "trained text that no engine call wrote"
        if turn["call"] >= FIRST_ARTIFICIAL_CALL
        else f"engine call {turn['call']}"
    )
    reward = "" if turn["reward"] is None else f", reward {turn['reward']:g}"
    return f"Turn {number}: {_tokens(turn['stop'] - turn['start'])}, {call}, ended by {turn['finish']}{reward}"


def _observation_title(count: int) -> str:
    return f"Observation: {_tokens(count)}, which a tool or the environment wrote"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count:,} tokens"
