"""The token record: what each call saw and wrote is in the lines, once."""

import random
import time
from array import array
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.engines.fake import fake_routes
from asyncrl.episodes import GeneratedTurn, Trajectory
from asyncrl.rollouts.record import EDITED, NEW, PARALLEL, TEMPLATE, TokenRecord, ids_of, same_up_to
from asyncrl.token_columns import TokenSets
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


@pytest.mark.parametrize("seed", range(50))
def test_the_common_length_is_found(seed: int) -> None:
    draw = random.Random(seed)
    left = array("i", draw.choices(range(3), k=draw.randint(0, 40)))
    right = left[: draw.randint(0, len(left))] + array("i", draw.choices(range(3), k=draw.randint(0, 5)))
    pairs = zip(left, right, strict=False)
    plainly = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
    assert same_up_to(left, right) == plainly


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
