import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.compat import SlimeArgs, pick_from_slime
from asyncrl.errors import FilterFailed, PluginError
from asyncrl.plugins import PICK, load_plugin
from asyncrl.plugins.buffer_filter_check import checked_pick
from asyncrl.types import GroupId, Picked, ScoredGroup
from tests.unit.scored_groups import group

ARGS = SlimeArgs(lr=0.5)
WAITING = [group(number, (0.0, number), (2, 3), step=number) for number in (3, 5, 7, 9)]
LABEL = "--buffer-filter-path 'my.filter'"
Buffer = list[list[Any]]

CODE = """
from asyncrl.types import Picked

def ours(step, waiting, size):
    return Picked(train=tuple(group.group_id for group in waiting[:size]), drop={waiting[-1].group_id: f"step_{step}"})

def slimes(args, rollout_id, buffer, num_samples):
    assert args.lr == 0.5 and rollout_id == 4
    return [buffer.pop(0) for _ in range(num_samples)]

def fails(args, rollout_id, buffer, num_samples):
    return buffer[99]

def too_few(step, waiting): ...
async def waits(step, waiting, size): ...
def too_few_of_slime_s(args, buffer): ...
"""


@pytest.fixture
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "picks.py").write_text(CODE)


@pytest.mark.usefixtures("_file")
def test_both_shapes_load() -> None:
    assert load_plugin("picks.py:ours", PICK, ARGS)(4, WAITING, 2) == Picked(
        train=ids(3, 5), drop={GroupId(9): "step_4"}
    )
    assert load_plugin("picks.py:slimes", PICK, ARGS)(4, WAITING, 2) == Picked(train=ids(3, 5))


@pytest.mark.usefixtures("_file")
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("too_few", "must take (step, waiting, size) or slime's (args, rollout_id, buffer, num_samples, **kwargs), "
         "takes (step, waiting)"),
        ("too_few_of_slime_s", "must take (step, waiting, size) or slime's (args, rollout_id, buffer, num_samples, "
         "**kwargs), takes (args, buffer)"),
        ("waits", "must be written with 'def', not 'async def'"),
    ],
)  # fmt: skip
def test_other_shapes_are_refused_at_the_start(name: str, line: str) -> None:
    with pytest.raises(PluginError) as error:
        load_plugin(f"picks.py:{name}", PICK, ARGS)
    assert str(error.value) == f"--buffer-filter-path 'picks.py:{name}': {line}"


def ids(*numbers: int) -> tuple[GroupId, ...]:
    return tuple(map(GroupId, numbers))


def picked_by_slime_s(function: Callable[..., Any], waiting: Sequence[ScoredGroup] = WAITING, size: int = 2) -> Picked:
    return checked_pick(pick_from_slime(function, ARGS), LABEL)(4, waiting, size)


def test_groups_neither_returned_nor_left_are_dropped() -> None:
    def best(args: Any, rollout_id: int, buffer: Buffer, num_samples: int) -> Buffer:
        buffer.sort(key=lambda samples: -samples[1].reward)
        taken, buffer[:] = buffer[:1], buffer[2:]
        return taken

    assert picked_by_slime_s(best) == Picked(train=ids(9), drop={GroupId(7): "best"})


def test_returned_groups_are_trained_even_if_left_in_the_buffer() -> None:
    assert picked_by_slime_s(lambda args, rollout_id, buffer, num_samples: buffer[:2]) == Picked(train=ids(3, 5))


def test_groups_are_told_by_their_samples_not_by_their_place_or_list() -> None:
    def reordered(args: Any, rollout_id: int, buffer: Buffer, num_samples: int) -> Any:
        last, first = buffer.pop(), buffer.pop(0)
        buffer.reverse()
        return (list(reversed(last)), tuple(first))

    assert picked_by_slime_s(reordered) == Picked(train=ids(9, 3))


def test_a_filter_may_leave_everything() -> None:
    assert picked_by_slime_s(lambda args, rollout_id, buffer, num_samples: []) == Picked()
    assert picked_by_slime_s(lambda args, rollout_id, buffer, num_samples: buffer, waiting=[]) == Picked()


def test_samples_have_slimes_type_and_keep_changed_fields_while_they_wait() -> None:
    seen: list[Any] = []

    def counts(args: Any, rollout_id: int, buffer: Buffer, num_samples: int) -> Buffer:
        first = buffer[0][0]
        first.metadata["asked"] = first.metadata.get("asked", 0) + 1
        seen.append((first.reward, first.response_length, first.weight_versions, first.metadata["asked"]))
        del buffer[0][1]  # its list is a new one every time
        buffer[0] = [*buffer[0], buffer[0][0]]
        return []

    pick = pick_from_slime(counts, ARGS)
    assert pick(0, WAITING, 2) == pick(1, WAITING[:2], 2) == pick(2, WAITING, 2) == Picked()
    assert seen == [(0.0, 2, ["3"], 1), (0.0, 2, ["3"], 2), (0.0, 2, ["3"], 3)]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda args, rollout_id, buffer, size: [buffer[0], buffer[0]], "picked group 3 twice"),
        (lambda args, rollout_id, buffer, size: list(buffer), "picked 4 groups, at most 2 fit into the batch"),
        (lambda args, rollout_id, buffer, size: [buffer[0][:1]], "returned: 1 of the 2 samples of group 3"),
        (lambda args, rollout_id, buffer, size: [[1]], "returned: [1], which is no group of the buffer"),
        (lambda args, rollout_id, buffer, size: [[]], "returned: [], which is no group of the buffer"),
        (lambda args, rollout_id, buffer, size: ["x"], "returned: 'x', which is no group of the buffer"),
        (lambda args, rollout_id, buffer, size: None, "must return a list of groups, got None"),
        (lambda args, rollout_id, buffer, size: buffer.append([]), "must return a list of groups, got None"),
        (lambda args, rollout_id, buffer, size: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_mistakes_in_slimes_shape_are_named(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(FilterFailed) as error:
        picked_by_slime_s(function)
    place = f" (test_buffer_filters.py:{function.__code__.co_firstlineno}, in <lambda>)"
    assert str(error.value).endswith(f": {problem}" + (place if "Zero" in problem else ""))
    assert str(error.value).startswith(f"step 4: {LABEL}: ")


def test_samples_of_two_groups_are_no_group() -> None:
    with pytest.raises(FilterFailed, match="which is no group of the buffer"):
        picked_by_slime_s(lambda args, rollout_id, buffer, size: [[buffer[0][0], buffer[1][1]]])


def test_the_buffer_must_still_hold_groups() -> None:
    def mixes(args: Any, rollout_id: int, buffer: Buffer, size: int) -> Buffer:
        buffer.append([buffer[0][0], buffer[1][0]])
        return []

    with pytest.raises(FilterFailed, match="left in the buffer: "):
        picked_by_slime_s(mixes)


def raises_cancelled(step: int, waiting: Sequence[ScoredGroup], size: int) -> Picked:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((3, 5), "must return Picked(train=..., drop=...), got (3, 5)"),
        (Picked(train=ids(3, 5, 7)), "picked 3 groups, at most 2 fit into the batch"),
        (Picked(train=ids(3, 3)), "picked group 3 twice"),
        (Picked(train=ids(3), drop={GroupId(3): "old"}), "picked group 3 and dropped it as well"),
        (Picked(train=ids(4)), "named 4, which is no group that waits"),
        (Picked(drop={GroupId(4): "old"}), "named 4, which is no group that waits"),
        (Picked(drop={GroupId(5): ""}), "dropped group 5 without a reason"),
    ],
)
def test_mistakes_in_our_shape_are_named(answer: Any, problem: str) -> None:
    def mine(step: int, waiting: Sequence[ScoredGroup], size: int) -> Any:
        return answer

    with pytest.raises(FilterFailed) as error:
        checked_pick(mine, LABEL)(4, WAITING, 2)
    assert str(error.value) == f"step 4: {LABEL}: {problem}"


@pytest.mark.usefixtures("_file")
def test_an_error_names_the_users_function_and_its_line() -> None:
    line = 1 + CODE.splitlines().index("    return buffer[99]")
    with pytest.raises(FilterFailed) as error:
        load_plugin("picks.py:fails", PICK, ARGS)(4, WAITING, 2)
    text = f"IndexError: list index out of range (picks.py:{line}, in fails)"
    assert str(error.value) == f"step 4: --buffer-filter-path 'picks.py:fails': {text}"


def test_a_filter_cannot_cancel_the_run() -> None:
    with pytest.raises(FilterFailed, match=f"{LABEL}: CancelledError: .*, in raises_cancelled"):
        checked_pick(raises_cancelled, LABEL)(4, WAITING, 2)
