"""The search for the turns of an episode in the tokens that a function of slime's shape returned.

    tokens      prompt │ response ............................................
    mask               │ 1 1 1 1 0 0 0 0 1 1 1 1 1 1 0 0 1 1
    regions            │ turn 0  │       │ turn 1    │   │ no turn

A turn is found by its position where the tokens agree with the record from the start, and else by its content.  The
log-probs of a turn that is found by content belong to another context; it is *moved*.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from asyncrl.episodes import GeneratedTurn
from asyncrl.rollouts.record import Line, TokenIds, TokenRecord, ids_of, same_up_to

_ONES = re.compile(b"\x01+")
FEWEST_ALIKE = 4
"""Least number of tokens that a turn and the returned ones have in common at their start, if the rest differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Tokens ``start`` to ``stop`` of a response, and the turn that wrote them."""

    start: int
    stop: int
    turn: GeneratedTurn | None = None
    """None: no turn of the record has these tokens."""
    offset: int = 0
    """Position in the turn of the first of them."""
    is_moved: bool = False
    """Whether the engine saw other tokens before the turn."""


def regions_of(
    tokens: TokenIds,
    prompt_length: int,
    mask: bytes,
    record: TokenRecord,
    preference: Callable[[Region], float] = lambda _: 0.0,
) -> list[Region]:
    """Return the regions of the response in order, apart from each other; they cover every token with mask 1.

    Of several turns with the same tokens behind the same tokens, the one with the highest ``preference`` is taken.
    """
    candidates = [_by_position(tokens, line) for line in record.lines]
    most = max(map(_num_tokens, candidates), default=0)
    best = [each for each in candidates if each and _num_tokens(each) == most]
    found = max(best, key=lambda each: preference(each[-1])) if len(best) > 1 else [*best, []][0]
    regions = [region for each in found if (region := _in_response(each, prompt_length))]
    used = {each.turn.call for each in found if each.turn is not None}
    begin = max((region.stop for region in regions), default=0)
    if any(mask[begin:]):
        rest = [turn for call, turn in sorted(_turns(record).items()) if call not in used]
        regions += _by_content(tokens[prompt_length:], mask, begin, rest)
    return sorted([*regions, *_unexplained(regions, mask)], key=lambda region: region.start)


def _turns(record: TokenRecord) -> dict[int, GeneratedTurn]:
    return {turn.call: turn for line in record.lines for _, turn in line.turns}


def _num_tokens(regions: Sequence[Region]) -> int:
    return sum(region.stop - region.start for region in regions)


def _by_position(tokens: TokenIds, line: Line) -> list[Region]:
    """Return the turns of a line that ``tokens`` hold behind the same tokens; positions count from the prompt's start.

    The last one may be held in part.
    """
    at = 0
    found: list[Region] = []
    for place, turn in line.turns:
        start = line.prompt_len + place
        stop = start + len(turn.token_ids)
        if tokens[at:start] != line.ids[at:start]:
            break
        alike = same_up_to(tokens[start:stop], line.ids[start:stop])
        is_whole = alike == len(turn.token_ids)
        if is_whole or alike >= FEWEST_ALIKE or start + alike == len(tokens):
            found.append(Region(start=start, stop=start + alike, turn=turn))
        if not is_whole:
            break
        at = stop
    return found


def _in_response(region: Region, prompt_length: int) -> Region | None:
    """Return the part of a region behind the prompt, with positions in the response; None if it is empty."""
    start = max(region.start, prompt_length)
    if start >= region.stop:
        return None
    return Region(
        start=start - prompt_length, stop=region.stop - prompt_length, turn=region.turn, offset=start - region.start
    )


def _by_content(response: TokenIds, mask: bytes, begin: int, turns: Sequence[GeneratedTurn]) -> list[Region]:
    """Return the turns that ``response`` holds from ``begin`` on.

    Whole turns come first, in the order of their calls.  Only then do beginnings of others get what is left, the
    longest first, because turns begin alike: with the same thought, or the same mark.
    """
    found: list[Region] = []
    packed, free, cut = response.tobytes(), bytearray(mask), []
    free[:begin] = bytes(begin)
    for turn in turns:
        ids = ids_of(turn.token_ids)
        start = _place(packed, ids, mask, begin)
        if start is None:
            cut.append((turn, ids))
        else:
            begin = start + len(ids)
            found.append(Region(start=start, stop=begin, turn=turn, is_moved=True))
            free[start:begin] = bytes(len(ids))
    left = bytes(free)
    for turn, ids in sorted(cut, key=lambda each: -_beginning(response, each[1], left)[1]):
        start, length = _beginning(response, ids, bytes(free))
        if length:
            found.append(Region(start=start, stop=start + length, turn=turn, is_moved=True))
            free[start : start + length] = bytes(length)
    return found


def _place(packed: bytes, ids: TokenIds, mask: bytes, begin: int) -> int | None:
    """Return the first place from ``begin`` on where ``ids`` stand and at least one of them is trained, or None."""
    wanted, size = ids.tobytes(), ids.itemsize
    at = packed.find(wanted, size * begin) if wanted else -1
    while at >= 0:
        if at % size == 0 and any(mask[at // size : at // size + len(ids)]):
            return at // size
        at = packed.find(wanted, at + 1)
    return None


def _beginning(response: TokenIds, ids: TokenIds, free: bytes) -> tuple[int, int]:
    """Return place and length of the longest beginning of ``ids`` where free tokens begin; length 0 without one.

    ``free`` has a 1 for each trained token that no turn has.
    """
    best = (0, 0)
    for start, stop in _runs(free):
        if response[start : start + FEWEST_ALIKE] != ids[:FEWEST_ALIKE]:  # most runs; copying all of each is slow
            continue
        alike = same_up_to(response[start:stop], ids)
        if alike >= FEWEST_ALIKE and alike > best[1]:
            best = (start, alike)
    return best


def _runs(mask: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each run of ones."""
    for found in _ONES.finditer(mask):
        yield found.span()


def _unexplained(regions: Sequence[Region], mask: bytes) -> list[Region]:
    left = bytearray(mask)
    for region in regions:
        left[region.start : region.stop] = bytes(region.stop - region.start)
    return [Region(start=start, stop=stop) for start, stop in _runs(bytes(left))]
