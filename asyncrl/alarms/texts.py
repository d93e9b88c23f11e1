"""Numbers of the texts of one step, on which rules about answers rest."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MOST_ANSWERS = 256
"""Answers of a step that are read."""
TAIL = 240
"""Characters at the end of an answer that are searched for repetitions."""
LONGEST_PIECE = 60
"""Characters of the longest piece whose repetition is found: a quarter of the tail."""
SHORTEST_TAIL = 24
"""Characters below which a repetition is no sign: the quickstart's answers repeat digits."""
REPEATS = 4
SAMPLED = 2_000
"""Characters of an answer that are searched for garbage: its end, where decay is seen first."""
_ALLOWED = frozenset("\n\r\t")
_ROLE = re.compile(
    r"\s*<?\|?(im_start|start_header_id|start_of_turn|begin_of_text)\|?>?|\s*(assistant|user|system)\s*[:\n]"
)
"""The beginning of a turn in the chat templates of Qwen, Llama and Gemma."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its group, its text and its log-probs under the policy that wrote it."""

    group: int
    text: str
    logprob: float | None = None
    """Mean log-prob of its tokens; None if unknown."""


def text_numbers(answers: Iterable[Answer]) -> Mapping[str, float]:
    """Return shares by name, each 0 to 1; empty without answers."""
    chosen = list(answers)[:MOST_ANSWERS]
    if not chosen:
        return {}
    texts = [answer.text for answer in chosen]
    return {
        "texts/repeated": _share([repeats(text) for text in texts]),
        "texts/garbage": garbage(texts),
        "texts/empty": _share([not text.strip() for text in texts]),
        "texts/begin_turn": _share([_ROLE.match(text) is not None for text in texts]),
        "texts/alike": _share(list(_alike(chosen))),
    }


def repeats(text: str) -> bool:
    """Whether the end of a text is one piece, again and again."""
    tail = text.rstrip()[-TAIL:]
    if len(tail) < SHORTEST_TAIL:
        return False
    for length in range(1, min(LONGEST_PIECE, len(tail) // REPEATS) + 1):
        end = tail[-max(SHORTEST_TAIL, REPEATS * length) :]
        if end[length:] == end[:-length]:
            return True
    return False


def garbage(texts: Sequence[str]) -> float:
    """Return the share of characters that no text has: replacements of broken bytes, controls, unassigned ones."""
    counts = Counter[str]()
    for text in texts:
        counts.update(text[-SAMPLED:])
    total = counts.total()
    return sum(count for each, count in counts.items() if _is_garbage(each)) / total if total else 0.0


def _is_garbage(character: str) -> bool:
    return character == "\N{REPLACEMENT CHARACTER}" or (
        character not in _ALLOWED and unicodedata.category(character) in {"Cc", "Cn", "Co", "Cs"}
    )


def _alike(answers: Sequence[Answer]) -> Iterable[bool]:
    """Yield for each group of at least two answers whether all are the same."""
    groups: dict[int, list[str]] = {}
    for answer in answers:
        groups.setdefault(answer.group, []).append(answer.text)
    return (len(set(texts)) == 1 for texts in groups.values() if len(texts) > 1)


def _share(signs: Sequence[bool]) -> float:
    return sum(signs) / len(signs) if signs else 0.0
