"""Runs of an episode without engines, for the tests of users.

played = play(my_episode, prompt="What is 2 + 3?", answers=["<calc>2 + 3</calc>", "It is 5."])
assert played.trajectories[0].reward.value == 1.0
"""

import asyncio
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.episodes import EpisodeEnd, EpisodeStart, GeneratedTurn, Trajectory
from asyncrl.rollouts.chat import ChatTokenizer
from asyncrl.rollouts.interfaces import EpisodeAddress
from asyncrl.rollouts.native import EpisodeSettings
from asyncrl.rollouts.native_program import EpisodeFunction, NativeProgram
from asyncrl.rollouts.session import EpisodeLimits, EpisodeSession
from asyncrl.types import Chunk, FinishReason, GroupId, JsonValue, Prompt, SamplingParams, Span, Weights

END = "<|im_end|>"
"""The end of a turn in the template of ``CharacterTokenizer``."""


class CharacterTokenizer:
    """A tokenizer with one token per character, and a chat template with ``<|im_start|>`` and ``<|im_end|>``."""

    def encode(self, text: str) -> list[int]:
        """Return the code points of ``text``."""
        return [ord(character) for character in text]

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of code points."""
        return "".join(map(chr, token_ids))

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None = None, variables: Mapping[str, Any] = {}
    ) -> str:
        """Render a chat up to the start of the answer; ``tools`` are left out."""
        turns = (f"<|im_start|>{each['role']}\n{each['content']}{END}\n" for each in messages)
        return "".join([*turns, "<|im_start|>assistant\n"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The result of an episode."""

    trajectories: tuple[Trajectory, ...]
    end: EpisodeEnd
    seen: tuple[str, ...]
    """The text that the model saw before each of its turns."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class ScriptedTurns:
    """The model of a test: it gives one answer after the other."""

    weights = Weights(version=0, step=0)

    def __init__(self, answers: Iterator[str | Sequence[int]], tokenizer: ChatTokenizer) -> None:
        self.seen: list[str] = []
        self._answers = answers
        self._tokenizer = tokenizer

    async def generate(
        self,
        token_ids: tuple[int, ...],
        sampling: SamplingParams,
        on_chunk: Callable[[Chunk], None] | None = None,
        routes_from: int = 0,
    ) -> GeneratedTurn:
        """Return the next answer.  Raises AssertionError if there is none left."""
        await asyncio.sleep(0)
        call = len(self.seen)
        self.seen.append(self._tokenizer.decode(token_ids))
        answer = next(self._answers, None)
        if answer is None:
            raise AssertionError(f"the episode asks for turn {call}, and answers has only {call}")
        found = self._tokenizer.encode(answer) if isinstance(answer, str) else list(answer)
        written = tuple(found[: sampling.max_new_tokens])
        return GeneratedTurn(
            call=call,
            token_ids=written,
            logprobs=array("f", [-1.0] * len(written)),
            spans=(Span(weights=self.weights, start=0, stop=len(written)),) if written else (),
            text=self._tokenizer.decode(written),
            finish=FinishReason.STOP if len(written) == len(found) else FinishReason.LENGTH,
            seconds=0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """An episode in this process."""

    start: EpisodeStart
    session: EpisodeSession
    address: EpisodeAddress = EpisodeAddress(host="127.0.0.1", port=9, key="no-gateway", secret="")  # noqa: RUF009

    async def generate(
        self,
        token_ids: tuple[int, ...],
        sampling: SamplingParams | None = None,
        *,
        conversation: int = 0,
        reason: str | None = None,
    ) -> GeneratedTurn:
        return await self.session.generate(token_ids, sampling, conversation=conversation, reason=reason)


def play(
    function: EpisodeFunction,
    *,
    prompt: str | Sequence[Mapping[str, Any]],
    answers: Sequence[str | Sequence[int]],
    label: JsonValue = None,
    metadata: Mapping[str, Any] | None = None,
    template_variables: Mapping[str, Any] | None = None,
    tokenizer: ChatTokenizer | None = None,
    max_turns: int | None = None,
    max_new_tokens: int = 4096,
    max_context_len: int = 100_000,
    tool_timeout_s: float = 60.0,
    reward_key: str | None = None,
    is_evaluation: bool = False,
) -> Played:
    """Run an episode whose model gives ``answers``: texts, or token ids.  Raises what the function raises.

    ``prompt`` is text, or messages that the chat template renders with ``template_variables``.  ``tokenizer``:
    ``load_tokenizer(checkpoint)`` of ``asyncrl.data.tokenizer``; without it, every character is a token.
    """
    tokenizer = tokenizer or CharacterTokenizer()
    variables = template_variables or {}
    text = prompt if isinstance(prompt, str) else tokenizer.render([dict(each) for each in prompt], variables=variables)
    start = EpisodeStart(
        name="played.0",
        prompt=Prompt(
            row=0,
            epoch=0,
            text=text,
            token_ids=tuple(tokenizer.encode(text)),
            label=label,
            metadata=metadata or {},
            messages=None if isinstance(prompt, str) else tuple(prompt),
            template_variables=variables,
        ),
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=max_new_tokens),
        index=0,
        group_size=1,
        seed=0,
        group_id=None if is_evaluation else GroupId(0),
        data_set="played" if is_evaluation else None,
    )
    settings = EpisodeSettings(
        tokenizer=tokenizer,
        tool_timeout_s=tool_timeout_s,
        max_turns=max_turns,
        reward_keys={start.data_set: reward_key},
    )
    limits = EpisodeLimits(vocabulary_size=2**31, max_context_len=max_context_len, max_turns=max_turns)
    return asyncio.run(_played(NativeProgram(function, settings), start, limits, iter(answers), tokenizer))


async def _played(
    program: NativeProgram,
    start: EpisodeStart,
    limits: EpisodeLimits,
    answers: Iterator[str | Sequence[int]],
    tokenizer: ChatTokenizer,
) -> Played:
    turns = ScriptedTurns(answers, tokenizer)
    session = EpisodeSession(start, turns, limits, tokenizer.decode)
    outcome = session.outcome(await program(_Call(start=start, session=session)))
    return Played(
        trajectories=outcome.trajectories, end=outcome.end, seen=tuple(turns.seen), metrics=dict(outcome.metrics)
    )
