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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from asyncrl.episodes import GeneratedTurn, Trajectory
from asyncrl.token_columns import Routes, TokenSets, completed, joined_sets
from asyncrl.types import FinishReason, Reward, Sample, Span, Turn

EDITED = "edited"
"""A branch: the tokens depart from a line behind its prompt, because the client changed its history."""
TEMPLATE = "template"
"""A branch: the chat template renders an earlier turn in another way, such as without its thinking."""
PARALLEL = "parallel"
"""A branch: a second call behind the same tokens, as by ``n`` above 1 or a retry."""
NEW = "new"
"""A branch: a conversation that departs from the others in its prompt."""
FORK = "fork"
"""A branch: the user's function continues the same tokens in two ways."""

TokenIds = array[int]
"""An ``array("i", ...)`` of token ids: 4 bytes each, where a tuple of ints takes 40.

1,024 episodes of 30,000 tokens take 120 MB.  Slices of two arrays are compared at memory speed.
"""

_PROBE = 64
"""Tokens that are compared before all others."""

NOTHING_KEPT: Mapping[int, int] = {}


def ids_of(token_ids: Sequence[int]) -> TokenIds:
    """Return ``token_ids`` as an array.  Raises TypeError or OverflowError for entries that are no 32-bit integers."""
    return token_ids if isinstance(token_ids, array) else array("i", token_ids)


@dataclass(slots=True, kw_only=True)
class Line:
    """One sample under construction.  Tokens are only ever appended."""

    ids: TokenIds
    """Tokens of the prompt and the response: turns and observations."""
    prompt_len: int
    conversation: int
    """Number of the conversation that the line belongs to; conversations may have separate rewards."""
    turns: list[tuple[int, GeneratedTurn]] = field(default_factory=list)
    """Each turn with the position of its first token among the response tokens."""
    owned: set[int] = field(default_factory=set)
    """Calls whose turns are in the loss of this line."""
    routes: list[Routes] = field(default_factory=list)
    """Routes of the first positions, one part after the other; empty if the engine tells none."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Response tokens: turns and observations."""
        return tuple(self.ids[self.prompt_len :])

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the response."""
        return len(self.ids)

    def is_prefix_of(self, ids: TokenIds) -> bool:
        """Return whether ``ids`` begin with this line's prompt and response."""
        return _may_share(ids, self.ids, len(self.ids)) and ids[: len(self.ids)] == self.ids

    def num_shared_turns(self, num_same: int) -> int:
        """Return the number of first turns within the first ``num_same`` tokens of prompt and response."""
        ends = (self.prompt_len + start + len(turn.token_ids) for start, turn in self.turns)
        return sum(end <= num_same for end in ends) if num_same >= self.prompt_len else 0

    def append(self, observed: Sequence[int], turn: GeneratedTurn) -> None:
        """Append observed tokens and a turn, which becomes part of the loss of this line."""
        self.ids.extend(observed)
        self.turns.append((len(self.ids) - self.prompt_len, turn))
        self.ids.extend(turn.token_ids)
        self.owned.add(turn.call)


class TokenRecord:
    """All engine calls of one episode.  Pure bookkeeping: it never waits.

    An episode may branch in every turn, so that a call of 60,000 tokens meets 200 lines of that length.  Searches start
    at the newest line, and compare another one in full only if its tokens at the end of the best match so far agree.
    Of equally good lines the oldest one is taken.
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.branches: Counter[str] = Counter()
        """Number of branches by reason."""
        self._dropped: Counter[int] = Counter()
        """The most tokens of each turn, by call, that a later context of the same conversation no longer held."""

    @property
    def num_turns(self) -> int:
        """Number of turns, each counted once."""
        return sum(len(line.owned) for line in self.lines)

    @property
    def num_dropped(self) -> int:
        """Number of tokens of turns that a later context of the same conversation no longer held."""
        return self._dropped.total()

    def add(
        self,
        token_ids: Sequence[int],
        turn: GeneratedTurn,
        *,
        conversation: int = 0,
        reason: str | None = None,
        kept: Mapping[int, int] = NOTHING_KEPT,
        known_routes: Sequence[Routes] = (),
    ) -> Line:
        """Record that ``turn`` was generated behind ``token_ids``; return the line that holds it now.

        ``known_routes`` are the routes of the positions before those of ``turn.routes``.
        If the turn branches, ``reason`` is counted instead of the one found here, and ``kept`` has the number of tokens
        by call that the new context still holds of turns behind the branch.
        """
        ids = ids_of(token_ids)
        line = self.longest_prefix(ids, conversation)
        if line is None:
            line = self._branch(ids, conversation, reason, kept)
        line.append(ids[len(line.ids) :], turn)
        line.routes = [*known_routes] if turn.routes is None else [*known_routes, turn.routes]
        return line

    def known_routes(self, token_ids: TokenIds) -> list[Routes]:
        """Return the known routes of the first positions of ``token_ids``, whose last one is never known.

        A route depends only on the tokens up to its position, so any line with the same first tokens has it.
        """
        return self._first_routes(token_ids, len(token_ids) - 1)

    def routes_of(self, token_ids: TokenIds) -> Routes | None:
        """Return the routes of a sample of these tokens, prompt and response; None if the engine told none."""
        num_positions = len(token_ids) - 1
        found = completed(self._first_routes(token_ids, num_positions), num_positions)
        told = next((part for line in self.lines for part in line.routes), None)
        return Routes.unknown(num_positions, told) if found is None and told is not None else found

    def _first_routes(self, token_ids: TokenIds, most: int) -> list[Routes]:
        found: list[Routes] = []
        longest = 0
        for line in reversed(self.lines):
            if line.routes and _may_share(token_ids, line.ids, longest):
                size = min(sum(map(len, line.routes)), most)
                size = same_up_to(token_ids[:size], line.ids[:size])
                if size >= longest:
                    found, longest = line.routes, size
        return _cut(found, longest)

    def longest_prefix(self, token_ids: Sequence[int], conversation: int = 0) -> Line | None:
        """Return the longest line of the conversation that ``token_ids`` extend, or None."""
        ids = ids_of(token_ids)
        longest: Line | None = None
        for line in reversed(self.lines):
            is_as_long = longest is None or line.num_tokens >= longest.num_tokens
            if line.conversation == conversation and is_as_long and line.is_prefix_of(ids):
                longest = line
        return longest

    def place_of(self, call: int) -> tuple[Line, int]:
        """Return the line that has the call's turn in its loss, and the position of its first token in ``Line.ids``."""
        line = next(line for line in reversed(self.lines) if call in line.owned)
        return line, line.prompt_len + next(start for start, turn in reversed(line.turns) if turn.call == call)

    def num_known(self, token_ids: TokenIds) -> int:
        """Return the number of first tokens that some line holds at the same places."""
        most = 0
        for line in reversed(self.lines):
            if _may_share(token_ids, line.ids, most + 1):
                most = max(most, same_up_to(token_ids, line.ids))
        return most

    def _branch(self, ids: TokenIds, conversation: int, reason: str | None, kept: Mapping[int, int]) -> Line:
        """Start a line, with the turns that it shares with the most similar one."""
        parent, num_same = self._most_similar(ids, conversation)
        line = Line(ids=ids[:], prompt_len=len(ids), conversation=conversation)
        self.lines.append(line)
        if parent is None:
            return line
        num_shared = parent.num_shared_turns(num_same)
        found = _reason(ids, parent, num_same) if reason is None else reason
        self.branches[found] += 1
        if found not in (NEW, PARALLEL, FORK):
            self._note_dropped(parent, num_shared, num_same, kept)
        if num_shared:
            start, last = parent.turns[num_shared - 1]
            line.prompt_len, line.turns = parent.prompt_len, parent.turns[:num_shared]
            line.ids = parent.ids[: parent.prompt_len + start + len(last.token_ids)]
        return line

    def _most_similar(self, ids: TokenIds, conversation: int) -> tuple[Line | None, int]:
        """Return the line of the conversation that has the most first tokens of ``ids``, and their number."""
        found: Line | None = None
        most = 0
        for line in reversed(self.lines):
            if line.conversation == conversation and _may_share(ids, line.ids, most):
                same = same_up_to(ids, line.ids)
                if same >= most:
                    found, most = line, same
        return found, most

    def _note_dropped(self, parent: Line, num_shared: int, num_same: int, kept: Mapping[int, int]) -> None:
        for start, turn in parent.turns[num_shared:]:
            in_place = max(0, num_same - parent.prompt_len - start)
            dropped = len(turn.token_ids) - kept.get(turn.call, in_place)
            self._dropped[turn.call] = max(self._dropped[turn.call], dropped)

    def trajectories(
        self,
        decode: Callable[[tuple[int, ...]], str],
        *,
        seconds: float,
        rewards: Mapping[int, Reward] | None = None,
        turn_rewards: Mapping[int, float] | None = None,
        left_out: frozenset[int] = frozenset(),
        group_prompt: tuple[int, ...] = (),
    ) -> tuple[Trajectory, ...]:
        """Return one trajectory per line.

        ``rewards`` are by conversation, ``turn_rewards`` by call, ``left_out`` are calls that are not trained.
        ``seconds`` is the duration of the episode.  Samples whose prompt is ``group_prompt`` name no other.
        """
        made = (
            _sample(line, prompt_ids, index, decode, seconds, turn_rewards or {})
            for index, (line, prompt_ids) in enumerate(zip(self.lines, self._prompts(group_prompt), strict=True))
        )
        return tuple(
            Trajectory(
                sample=sample,
                loss_mask=_mask(line, left_out),
                reward=(rewards or {}).get(line.conversation),
            )
            for line, sample in zip(self.lines, made, strict=True)
        )

    def _prompts(self, group_prompt: tuple[int, ...]) -> Iterator[tuple[int, ...] | None]:
        """Yield the prompt of each line, or None if it is ``group_prompt``.

        A prompt shares the integers of its first tokens with the one before it: 8 bytes per token instead of 36.
        """
        common, before, before_ids = ids_of(group_prompt), group_prompt, ids_of(group_prompt)
        for line in self.lines:
            ids = line.ids[: line.prompt_len]
            same = same_up_to(ids, before_ids)
            before, before_ids = before[:same] + tuple(ids[same:]), ids
            yield None if ids == common else before


def _sample(
    line: Line,
    prompt_ids: tuple[int, ...] | None,
    index: int,
    decode: Callable[[tuple[int, ...]], str],
    seconds: float,
    turn_rewards: Mapping[int, float],
) -> Sample:
    token_ids = line.tokens
    logprobs = array("f", bytes(4 * len(token_ids)))
    spans: list[Span] = []
    turns: list[Turn] = []
    for start, turn in line.turns:
        stop = start + len(turn.token_ids)
        logprobs[start:stop] = turn.logprobs
        spans += (replace(span, start=start + span.start, stop=start + span.stop) for span in turn.spans)
        turns.append(
            Turn(call=turn.call, start=start, stop=stop, finish=turn.finish, reward=turn_rewards.get(turn.call))
        )
    return Sample(
        index=index,
        token_ids=token_ids,
        logprobs=logprobs,
        spans=tuple(spans),
        text=decode(token_ids),
        finish=turns[-1].finish if turns else FinishReason.STOP,
        seconds=seconds,
        turns=tuple(turns),
        prompt_ids=prompt_ids,
        kept=sets_of_turns(len(token_ids), [(start, turn.kept) for start, turn in line.turns]),
        top=sets_of_turns(len(token_ids), [(start, turn.top) for start, turn in line.turns]),
        routes=completed(line.routes, len(line.ids) - 1),
    )


def _cut(parts: Sequence[Routes], num_positions: int) -> list[Routes]:
    """Return the first positions of consecutive parts."""
    found: list[Routes] = []
    for part in parts:
        if num_positions <= 0:
            break
        found.append(part if len(part) <= num_positions else part.part(0, num_positions))
        num_positions -= len(part)
    return found


def sets_of_turns(num_tokens: int, turns: Sequence[tuple[int, TokenSets | None]]) -> TokenSets | None:
    """Return the sets of ``num_tokens`` tokens from those of turns, each with the position of its first token.

    The turns are in order; the tokens between them have empty sets.  Returns None if no turn has sets.
    """
    parts: list[tuple[int, TokenSets | None]] = []
    end = 0
    for start, sets in turns:
        if sets is not None:
            parts += [(start - end, None), (len(sets), sets)]
            end = start + len(sets)
    return joined_sets([*parts, (num_tokens - end, None)])


def _mask(line: Line, left_out: frozenset[int]) -> tuple[int, ...]:
    mask = bytearray(len(line.ids) - line.prompt_len)
    for start, turn in line.turns:
        if turn.call in line.owned and turn.call not in left_out:
            mask[start : start + len(turn.token_ids)] = b"\x01" * len(turn.token_ids)
    return tuple(mask)


def _reason(ids: TokenIds, parent: Line, num_same: int) -> str:
    """Return the reason why ``ids`` depart from ``parent``, the line with which they have the most tokens in common."""
    starts = (parent.prompt_len + start for start, _ in parent.turns)
    if num_same == len(ids) and any(start == num_same for start in starts):
        return PARALLEL
    return EDITED if num_same >= parent.prompt_len else NEW


def _may_share(left: TokenIds, right: TokenIds, size: int) -> bool:
    """Return False if both cannot have the first ``size`` tokens in common, by the last few of these.

    Branches hold the same tokens at other places, so one equal token is often chance.
    """
    if size > min(len(left), len(right)):
        return False
    start = max(0, size - _PROBE)
    return left[start:size] == right[start:size]


def same_up_to(left: Sequence[int] | str, right: Sequence[int] | str) -> int:
    """Return the number of first tokens, or characters, that both have in common.

    Slices are compared in C.  Their size doubles until two differ, and halves from then on: 30,000 tokens take some 20
    comparisons, and the time grows with the common tokens alone.
    """
    low, high, size = 0, min(len(left), len(right)), _PROBE
    while left[low : (stop := min(low + size, high))] == right[low:stop]:
        if stop == high:
            return high
        low, size = stop, 2 * size
    high = stop
    while high - low > 1:  # the first ``low`` are equal, the first ``high`` are not
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
