"""The token record: what each call saw and wrote is in the lines, once."""

import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl.engines.fake import fake_routes
from asyncrl.episodes import GeneratedTurn, Trajectory
from asyncrl.rollouts.record import EDITED, NEW, PARALLEL, TEMPLATE, Line, TokenRecord, ids_of, same_up_to
from asyncrl.token_columns import Routes, TokenSets
from asyncrl.types import ScoredSample
from tests.unit.rollouts.turns import turn_of


def trajectories_of(record: TokenRecord, left_out: frozenset[int] = frozenset()) -> tuple[Trajectory, ...]:
    return record.trajectories(lambda ids: " ".join(map(str, ids)), seconds=1.0, left_out=left_out)


def random_history(draw: random.Random) -> tuple[TokenRecord, list[tuple[tuple[int, ...], GeneratedTurn]]]:
    """A record of calls that extend, cut, repeat or replace what earlier calls saw, in two conversations."""
    record, calls, ends = TokenRecord(), list[tuple[tuple[int, ...], GeneratedTurn]](), list[tuple[int, ...]]()
    for call in range(draw.randint(1, 14)):
        before = draw.choice(ends) if ends else ()
        before = before[: draw.randint(0, len(before))] if draw.random() < 0.3 else before
        context = (*before, *draw.choices(range(6), k=draw.randint(0 if before else 1, 4)))
        turn = turn_of(call, draw.choices(range(6), k=draw.choice((0, 1, 2, 5))))
        record.add(context, turn, conversation=len(context) % 2)
        calls.append((context, turn))
        ends += [(*context, *turn.token_ids), context]
    return record, calls


def check(record: TokenRecord, calls: list[tuple[tuple[int, ...], GeneratedTurn]]) -> None:
    made = trajectories_of(record)
    assert sorted(call for line in record.lines for call in line.owned) == list(range(len(calls)))
    for line, trajectory in zip(record.lines, made, strict=True):
        sample = trajectory.sample
        prompt = sample.prompt_ids or ()
        ScoredSample(sample=sample, reward=0.0, loss_mask=trajectory.loss_mask)  # checks the mask against the turns
        trained = [0] * len(sample.token_ids)
        for turn in sample.turns:
            context, generated = calls[turn.call]
            if turn.call in line.owned:
                trained[turn.start : turn.stop] = [1] * (turn.stop - turn.start)
                assert (*prompt, *sample.token_ids[: turn.start]) == context
            assert sample.token_ids[turn.start : turn.stop] == generated.token_ids
            assert sample.logprobs[turn.start : turn.stop] == generated.logprobs
        assert trajectory.loss_mask == tuple(trained)
        covered = [place for span in sample.spans for place in range(span.start, span.stop)]
        assert covered == [place for turn in sample.turns for place in range(turn.start, turn.stop)]


@pytest.mark.parametrize("seed", range(400))
def test_every_turn_is_in_the_loss_of_one_line_behind_the_tokens_that_its_call_saw(seed: int) -> None:
    check(*random_history(random.Random(seed)))


def test_a_call_that_extends_a_line_adds_an_observation() -> None:
    record = TokenRecord()
    record.add((1, 2), turn_of(0, (3, 4)))
    record.add((1, 2, 3, 4, 9, 9), turn_of(1, (5,)))
    (made,) = trajectories_of(record)
    assert made.sample.prompt_ids == (1, 2)
    assert made.sample.token_ids == (3, 4, 9, 9, 5)
    assert made.loss_mask == (1, 1, 0, 0, 1)
    assert made.sample.num_observed == 2
    assert not record.branches


def test_the_reason_of_a_branch_is_found() -> None:
    record = TokenRecord()
    record.add((1, 2), turn_of(0, (3, 4)))
    record.add((1, 2, 3, 4, 9), turn_of(1, (5, 6)))
    record.add((1, 2), turn_of(2, (7,)))
    record.add((1, 2, 3, 4, 8), turn_of(3, (5,)))
    record.add((1, 2, 3, 8), turn_of(4, (5,)))
    record.add((8, 8), turn_of(5, (5,)))
    record.add((1, 2, 5), turn_of(6, (5,)), reason=TEMPLATE)
    assert record.branches == {PARALLEL: 1, EDITED: 2, NEW: 1, TEMPLATE: 1}


def test_tokens_that_a_later_context_lacks_are_counted_once() -> None:
    record = TokenRecord()
    record.add((1, 2), turn_of(0, (3, 4, 5)))
    record.add((1, 2, 3, 4, 5, 9), turn_of(1, (6, 6)))
    record.add((1, 2, 3, 8), turn_of(2, (7,)))  # lacks two tokens of call 0, and call 1
    assert record.num_dropped == 4
    record.add((1, 2, 3, 8, 8), turn_of(3, (7,)))  # lacks the same
    assert record.num_dropped == 5  # and call 2


def test_tokens_that_a_context_still_holds_elsewhere_are_not_dropped() -> None:
    record = TokenRecord()
    record.add((1, 2), turn_of(0, (3, 4, 5)))
    record.add((1, 2, 4, 5, 9), turn_of(1, (6,)), reason=TEMPLATE, kept={0: 2})
    assert record.num_dropped == 1


def test_a_second_call_behind_the_same_tokens_drops_nothing() -> None:
    record = TokenRecord()
    for call in range(3):
        record.add((1, 2), turn_of(call, (3, 4)))
    assert (record.num_dropped, record.branches) == (0, {PARALLEL: 2})


def test_conversations_do_not_share_lines() -> None:
    record = TokenRecord()
    record.add((1, 2), turn_of(0, (3,)))
    record.add((1, 2, 3, 4), turn_of(1, (5,)), conversation=1)
    assert [line.conversation for line in record.lines] == [0, 1]
    assert not record.branches


def test_a_turn_without_tokens_is_a_sample() -> None:
    record = TokenRecord()
    record.add((1, 2), turn_of(0, ()))
    record.add((1, 2), turn_of(1, ()))
    (made,) = trajectories_of(record)
    assert (made.sample.token_ids, made.loss_mask, len(made.sample.turns)) == ((), (), 2)


def test_calls_that_are_left_out_are_masked() -> None:
    record = TokenRecord()
    record.add((1,), turn_of(0, (3,)))
    record.add((1, 3), turn_of(1, (4, 4)))
    (made,) = trajectories_of(record, frozenset({1}))
    assert made.loss_mask == (1, 0, 0)


def test_samples_behind_the_prompt_of_the_group_name_no_other() -> None:
    record = TokenRecord()
    record.add((1,), turn_of(0, (3,)))
    record.add((2,), turn_of(1, (3,)))
    made = record.trajectories(str, seconds=1.0, group_prompt=(1,))
    assert [each.sample.prompt_ids for each in made] == [None, (2,)]


def plainly_same(left: array[int], right: array[int]) -> int:
    """The number of first tokens in common, by a loop over them."""
    pairs = zip(left, right, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def test_branches_share_the_integers_of_their_prompts() -> None:
    record = TokenRecord()
    record.add((1000, 2000), turn_of(0, (3000,)))
    for call in range(1, 4):
        record.add((1000, 2000, 3000, *range(5000, 5100), 6000 + call), turn_of(call, (7,)))
    record.add((1000, 2000, 8000), turn_of(4, (7,)))
    record.add((1000, 2000, 8000, 9000), turn_of(5, (7,)))
    common = (1000, 2000)
    made = record.trajectories(str, seconds=1.0, group_prompt=common)
    prompts = [each.sample.prompt_ids for each in made]
    assert prompts == [None] * 3 + [(1000, 2000, 8000), (1000, 2000, 8000, 9000)]
    third, fourth = prompts[-2:]
    assert third is not None and fourth is not None
    assert all(left is right for left, right in zip(common, third, strict=False))
    assert all(left is right for left, right in zip(third, fourth, strict=False))


@pytest.mark.parametrize("seed", range(50))
def test_the_common_length_is_found(seed: int) -> None:
    draw = random.Random(seed)
    left = array("i", draw.choices(range(3), k=draw.choice((0, 3, 40, 64, 128, 192, 1000))))
    right = left[: draw.randint(0, len(left))] + array("i", draw.choices(range(3), k=draw.randint(0, 5)))
    assert same_up_to(left, right) == same_up_to(right, left) == plainly_same(left, right)


class PlainRecord(TokenRecord):
    """A record that compares each context with all lines from their first tokens on; the first of the best counts."""

    def longest_prefix(self, token_ids: Sequence[int], conversation: int = 0) -> Line | None:
        ids = ids_of(token_ids)
        fitting = [
            line
            for line in self.lines
            if line.conversation == conversation and plainly_same(ids, line.ids) == len(line.ids)
        ]
        return max(fitting, key=lambda line: line.num_tokens, default=None)

    def num_known(self, token_ids: array[int]) -> int:
        return max((plainly_same(token_ids, line.ids) for line in self.lines), default=0)

    def _most_similar(self, ids: array[int], conversation: int) -> tuple[Line | None, int]:
        others = [line for line in self.lines if line.conversation == conversation]
        parent = max(others, key=lambda line: plainly_same(ids, line.ids), default=None)
        return parent, 0 if parent is None else plainly_same(ids, parent.ids)

    def _first_routes(self, token_ids: array[int], most: int) -> list[Routes]:
        def size_of(line: Line) -> int:
            return min(sum(map(len, line.routes)), plainly_same(token_ids, line.ids), most)

        best = max(self.lines, key=size_of, default=None)
        found: list[Routes] = []
        for part in [] if best is None else best.routes:
            room = size_of(best) - sum(map(len, found)) if best is not None else 0
            found += [part if len(part) <= room else part.part(0, room)] if room > 0 else []
        return found


def blocks(draw: random.Random) -> list[int]:
    """Tokens that repeat, so that branches often hold equal tokens at the same places by chance."""
    return draw.choices(range(2), k=draw.choice((1, 1, 2, 3))) * draw.choice((0, 1, 1, 2, 60))


def routes_behind(known: Sequence[Routes], context: Sequence[int], generated: Sequence[int], call: int) -> Routes:
    """Routes that differ by call, also behind equal tokens, so that it shows which line they are from."""
    num_positions = len(context) + len(generated) - 1
    return fake_routes([call + 1] * (num_positions + 1)).part(sum(map(len, known)), num_positions)


@pytest.mark.parametrize("seed", range(300))
def test_searches_find_the_lines_that_a_plain_comparison_finds(seed: int) -> None:
    draw = random.Random(seed)
    record, plain = TokenRecord(), PlainRecord()
    ends: list[tuple[int, ...]] = [(0, *blocks(draw))]
    for call in range(draw.randint(1, 16)):
        before = draw.choice(ends)
        before = before[: draw.randint(1, len(before))] if draw.random() < 0.3 else before
        ids = ids_of((*before, *blocks(draw)) if draw.random() < 0.7 else before)
        conversation = draw.choice((0, 0, 0, 1))
        assert record.num_known(ids) == plain.num_known(ids)
        known, plainly_known = record.known_routes(ids), plain.known_routes(ids)
        assert known == plainly_known
        turn = turn_of(call, blocks(draw))
        if draw.random() < 0.7:
            turn = replace(turn, routes=routes_behind(known, ids, turn.token_ids, call))
        found = record.add(ids, turn, conversation=conversation, known_routes=known)
        plainly_found = plain.add(ids, turn, conversation=conversation, known_routes=plainly_known)
        assert record.lines.index(found) == plain.lines.index(plainly_found)
        assert record.lines == plain.lines
        assert (record.branches, record.num_dropped) == (plain.branches, plain.num_dropped)
        ends += [(*ids, *turn.token_ids), tuple(ids)]


class CountedIds(array[int]):
    """Token ids that count how many of them are read as slices."""

    num_read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(place, slice) else 1
        return found


def test_a_context_is_compared_with_the_newest_of_many_branches_alone() -> None:
    record, context = TokenRecord(), list(range(1_000))
    for call in range(100):
        ids = CountedIds("i", context)
        known = record.known_routes(ids)
        record.num_known(ids)
        turn = routed(call, tuple(range(300)), tuple(context), sum(map(len, known)))
        line = record.add(ids, turn, known_routes=known)
        assert ids.num_read < 8 * len(context) + 300 * len(record.lines)
        context += [*range(200, 300), 7, 8, 9]  # without its thinking, the first 200 tokens
        assert line is record.lines[-1]
    assert len(record.lines) == 100


def test_a_turn_behind_30_000_tokens_costs_no_loop_over_them() -> None:
    record, context = TokenRecord(), tuple(range(30_000))
    record.add(context, turn_of(0, (1, 2)))
    began = time.process_time()
    for call in range(1, 21):
        context = (*record.lines[0].ids, 5)
        record.add(context, turn_of(call, (1, 2)))
    assert (time.process_time() - began) / 20 < 0.01  # a loop in Python takes 2 ms and more per comparison
    assert len(record.lines) == 1


def test_the_kept_ids_of_a_turn_stay_with_its_tokens() -> None:
    record = TokenRecord()
    record.add((1, 2), replace(turn_of(0, (7, 8)), kept=sets_of([7], [8, 3])))
    record.add((1, 2, 7, 8, 5, 5), replace(turn_of(1, (9,)), kept=sets_of([9, 4])))
    record.add((1, 2, 7, 8, 6), turn_of(2, (9,)))  # drawn from the whole vocabulary
    whole, branch = (each.sample.kept for each in trajectories_of(record))
    assert whole == sets_of([7], [8, 3], [], [], [9, 4])
    assert branch == sets_of([7], [8, 3], [], [])
    assert trajectories_of(random_history(random.Random(1))[0])[0].sample.kept is None


def sets_of(*ids: list[int]) -> TokenSets:
    counts = np.array([len(each) for each in ids], np.int32)
    return TokenSets(counts_T=counts, ids_I=np.array([each for one in ids for each in one], np.int32))


def routed(call: int, token_ids: tuple[int, ...], before: tuple[int, ...], start: int) -> GeneratedTurn:
    """A turn with the fake engine's routes from position ``start`` on."""
    whole = (*before, *token_ids)
    return replace(turn_of(call, token_ids), routes=fake_routes(whole).part(start, len(whole) - 1))


def test_a_call_asks_for_the_rows_that_no_line_has_and_a_branch_takes_those_of_its_parent() -> None:
    record = TokenRecord()
    record.add((1, 2), routed(0, (7, 8), (1, 2), 0))
    context = (1, 2, 7, 8, 5)
    known = record.known_routes(ids_of(context))
    assert sum(map(len, known)) == 3  # the row of the last token of turn 0 comes with the next call
    record.add(context, routed(1, (9, 3), context, 3), known_routes=known)
    branch = (1, 2, 7, 8, 6)
    known = record.known_routes(ids_of(branch))
    assert sum(map(len, known)) == 4
    record.add(branch, routed(2, (9,), branch, 4), known_routes=known)
    again = record.known_routes(ids_of(context))  # as for a second answer: the last row predicts the first token
    assert sum(map(len, again)) == len(context) - 1
    for made in trajectories_of(record):
        whole = (*(made.sample.prompt_ids or ()), *made.sample.token_ids)
        assert made.sample.routes == fake_routes(whole).part(0, len(whole) - 1)


def test_rows_that_never_came_are_missing_at_the_end() -> None:
    record = TokenRecord()
    record.add((1, 2), routed(0, (7, 8), (1, 2), 0))
    record.add((1, 2, 7, 8, 5), turn_of(1, (9, 3)), known_routes=record.known_routes(ids_of((1, 2, 7, 8, 5))))
    (made,) = trajectories_of(record)
    assert made.sample.routes is not None
    assert made.sample.routes.missing == ((3, 6),)


def test_tokens_of_a_function_have_the_rows_of_the_positions_that_the_engine_saw() -> None:
    record = TokenRecord()
    assert record.routes_of(ids_of((1, 2, 7))) is None
    record.add((1, 2), routed(0, (7, 8), (1, 2), 0))
    routes = record.routes_of(ids_of((1, 2, 7, 4, 4)))
    assert routes is not None
    assert routes.missing == ((3, 4),)
    assert routes.part(0, 3) == fake_routes((1, 2, 7)).part(0, 3)
    elsewhere = record.routes_of(ids_of((3, 2, 7)))
    assert elsewhere is not None
    assert elsewhere.missing == ((0, 2),)
