"""The episode of the search example, after Search-R1 (Jin et al. 2025): think, search, read, answer."""

import re
import string
from typing import Any

import aiohttp

from asyncrl.rollouts.native import Episode

INVALID = "\nThe last action is invalid: write <search> query </search> or <answer> answer </answer>.\n"


class SearchEpisode:
    """Answers one question with a retriever at ``url``, which gives ``topk`` documents per query.

    The reward is 1.0 for the right answer, ``half`` for an answer in the right form, and 0.0 otherwise.  The number of
    searches becomes the metadata ``searches``.
    """

    def __init__(
        self, url: str = "http://127.0.0.1:8000/retrieve", topk: int = 3, most_searches: int = 4, half: float = 0.0
    ) -> None:
        self._url = url
        self._topk = topk
        self._most_searches = most_searches
        self._half = half

    async def __call__(self, ep: Episode) -> None:
        """Run one episode."""
        ep.reward, ep.metadata["searches"] = 0.0, 0
        for turns_left in range(min(ep.max_turns, self._most_searches + 1) - 1, -1, -1):
            turn = await ep.generate(stop=("</search>", "</answer>"))
            answer, query = between("answer", turn.text), between("search", turn.text)
            if answer is not None:
                ep.reward = 1.0 if is_same(answer, str(ep.label)) else self._half
                return
            if turns_left == 0 or turn.finish != "stop":
                return
            if query is None:
                ep.observe(INVALID)
            else:
                ep.metadata["searches"] += 1
                found = await ep.call(self.retrieve, query)
                ep.observe(f"\n\n<information>{found}</information>\n\n")

    async def retrieve(self, query: str) -> str:
        """Return the best documents as text."""
        request = {"queries": [query], "topk": self._topk, "return_scores": True}
        async with aiohttp.ClientSession() as session, session.post(self._url, json=request) as reply:
            reply.raise_for_status()
            found: dict[str, Any] = await reply.json()
        lines = []
        for number, hit in enumerate(found["result"][0], start=1):
            title, _, text = hit["document"]["contents"].partition("\n")
            lines.append(f"Doc {number}(Title: {title.strip('"')}) {text}")
        return "\n".join(lines) or "No document was found."


def between(mark: str, text: str) -> str | None:
    """Return the text behind the last ``<mark>``, with or without the stop string, which engines may cut off."""
    found = re.findall(rf"<{mark}>((?:(?!<{mark}>).)*?)(?:</{mark}>|\Z)", text, re.DOTALL)
    return found[-1].strip() if found else None


def is_same(answer: str, label: str) -> bool:
    """Compare without case, punctuation and articles, as SQuAD and Search-R1 do."""
    return _plain(answer) == _plain(label)


def _plain(text: str) -> list[str]:
    words = "".join(each for each in text.lower() if each not in string.punctuation).split()
    return [word for word in words if word not in ("a", "an", "the")]
