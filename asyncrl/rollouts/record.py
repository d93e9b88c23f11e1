"""The token record of an episode: what each engine call got and returned, as lines of turns and observations.

A *line* is one sample under construction: a prompt, then turns and observations in order.  A call whose tokens extend a
line continues it, and its further tokens are an observation.  Any other call branches: it starts a line, which shares
the turns before the place where its tokens depart.  Every turn is in the loss of one line, the first that held it; in
the others it is context.  What the model wrote is never tokenised again.

    line 0:  prompt │ turn 0 │ observation │ turn 1 │
    line 1:  prompt │ turn 0 │ another observation │ turn 2 │          branch "edited"; turn 0 is in the loss of line 0
"""

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from asyncrl.episodes import GeneratedTurn, Trajectory
from asyncrl.types import FinishReason, Reward, Sample, Span, Turn

EDITED = "edited"
"""A branch: the tokens depart from a line behind a turn, because the client changed its history."""
PARALLEL = "parallel"
"""A branch: a second call behind the same tokens, as by ``n`` above 1 or a retry."""
NEW = "new"
"""A branch: a conversation that shares no turn with another."""


@dataclass(slots=True, kw_only=True)
class Line:
    """One sample under construction."""

    prompt_ids: tuple[int, ...]
    conversation: int
    """Number of the conversation that the line belongs to; conversations may have separate rewards."""
    tokens: list[int] = field(default_factory=list)
    """Response tokens: turns and observations."""
    turns: list[tuple[int, GeneratedTurn]] = field(default_factory=list)
    """Each turn with the position of its first token among the response tokens."""
    owned: set[int] = field(default_factory=set)
    """Calls whose turns are in the loss of this line."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the response."""
        return len(self.prompt_ids) + len(self.tokens)

    def is_prefix_of(self, token_ids: tuple[int, ...]) -> bool:
        """Return whether ``token_ids`` begin with this line's prompt and response."""
        split = len(self.prompt_ids)
        return token_ids[:split] == self.prompt_ids and list(token_ids[split : self.num_tokens]) == self.tokens

    def num_shared_turns(self, token_ids: tuple[int, ...]) -> int:
        """Return the number of first turns that ``token_ids`` hold whole, at the same places."""
        split = len(self.prompt_ids)
        if token_ids[:split] != self.prompt_ids:
            return 0
        shared = same_up_to(token_ids[split:], self.tokens)
        return sum(start + len(turn.token_ids) <= shared for start, turn in self.turns)

    def append(self, observed: Sequence[int], turn: GeneratedTurn) -> None:
        """Append observed tokens and a turn, which becomes part of the loss of this line."""
        self.tokens.extend(observed)
        self.turns.append((len(self.tokens), turn))
        self.tokens.extend(turn.token_ids)
        self.owned.add(turn.call)


class TokenRecord:
    """All engine calls of one episode.  Pure bookkeeping: it never waits."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.branches: Counter[str] = Counter()
        """Number of branches by reason."""

    @property
    def num_turns(self) -> int:
        """Number of turns, each counted once."""
        return sum(len(line.owned) for line in self.lines)

    def add(
        self, token_ids: tuple[int, ...], turn: GeneratedTurn, *, conversation: int = 0, reason: str | None = None
    ) -> Line:
        """Record that ``turn`` was generated behind ``token_ids``; return the line that holds it now.

        ``reason`` is counted instead of the one found here if the turn branches.
        """
        line = self.longest_prefix(token_ids, conversation)
        if line is None:
            line = self._branch(token_ids, conversation, reason)
        line.append(token_ids[line.num_tokens :], turn)
        return line

    def longest_prefix(self, token_ids: tuple[int, ...], conversation: int = 0) -> Line | None:
        """Return the longest line of the conversation that ``token_ids`` extend, or None."""
        fitting = [line for line in self.lines if line.conversation == conversation and line.is_prefix_of(token_ids)]
        return max(fitting, key=lambda line: line.num_tokens, default=None)

    def _branch(self, token_ids: tuple[int, ...], conversation: int, reason: str | None) -> Line:
        """Start a line, with the turns that it shares with the most similar one."""
        line = Line(prompt_ids=token_ids, conversation=conversation)
        others = [each for each in self.lines if each.conversation == conversation]
        parent = max(others, key=lambda each: each.num_shared_turns(token_ids), default=None)
        shared = parent.turns[: parent.num_shared_turns(token_ids)] if parent else []
        if parent is not None:
            self.branches[reason or self._reason(token_ids, others, is_shared=bool(shared))] += 1
        if parent is not None and shared:
            start, last = shared[-1]
            line.prompt_ids, line.turns = parent.prompt_ids, shared
            line.tokens = parent.tokens[: start + len(last.token_ids)]
        self.lines.append(line)
        return line

    def _reason(self, token_ids: tuple[int, ...], others: Sequence[Line], *, is_shared: bool) -> str:
        for line in others:
            starts = (len(line.prompt_ids) + start for start, _ in line.turns)
            if any(start == len(token_ids) and _begins(line, token_ids) for start in starts):
                return PARALLEL
        return EDITED if is_shared else NEW

    def trajectories(
        self,
        decode: Callable[[tuple[int, ...]], str],
        *,
        seconds: float,
        rewards: Mapping[int, Reward] | None = None,
        turn_rewards: Mapping[int, float] | None = None,
        left_out: frozenset[int] = frozenset(),
    ) -> tuple[Trajectory, ...]:
        """Return one trajectory per line.

        ``rewards`` are by conversation, ``turn_rewards`` by call, ``left_out`` are calls that are not trained.
        ``seconds`` is the duration of the episode.
        """
        made = (_sample(line, index, decode, seconds, turn_rewards or {}) for index, line in enumerate(self.lines))
        return tuple(
            Trajectory(
                sample=sample,
                loss_mask=_mask(line, left_out),
                reward=(rewards or {}).get(line.conversation),
            )
            for line, sample in zip(self.lines, made, strict=True)
        )


def _sample(
    line: Line, index: int, decode: Callable[[tuple[int, ...]], str], seconds: float, turn_rewards: Mapping[int, float]
) -> Sample:
    logprobs = array("f", bytes(4 * len(line.tokens)))
    spans: list[Span] = []
    turns: list[Turn] = []
    for start, turn in line.turns:
        stop = start + len(turn.token_ids)
        logprobs[start:stop] = turn.logprobs
        spans += (replace(span, start=start + span.start, stop=start + span.stop) for span in turn.spans)
        turns.append(
            Turn(call=turn.call, start=start, stop=stop, finish=turn.finish, reward=turn_rewards.get(turn.call))
        )
    token_ids = tuple(line.tokens)
    return Sample(
        index=index,
        token_ids=token_ids,
        logprobs=logprobs,
        spans=tuple(spans),
        text=decode(token_ids),
        finish=turns[-1].finish if turns else FinishReason.STOP,
        seconds=seconds,
        turns=tuple(turns),
        prompt_ids=line.prompt_ids,
    )


def _mask(line: Line, left_out: frozenset[int]) -> tuple[int, ...]:
    mask = bytearray(len(line.tokens))
    for start, turn in line.turns:
        if turn.call in line.owned and turn.call not in left_out:
            mask[start : start + len(turn.token_ids)] = b"\x01" * len(turn.token_ids)
    return tuple(mask)


def _begins(line: Line, token_ids: tuple[int, ...]) -> bool:
    """Return whether the line's prompt and response begin with ``token_ids``."""
    split = len(line.prompt_ids)
    return token_ids[:split] == line.prompt_ids and list(token_ids[split:]) == line.tokens[: len(token_ids) - split]


def same_up_to(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of first tokens that both have in common."""
    return next(
        (place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
