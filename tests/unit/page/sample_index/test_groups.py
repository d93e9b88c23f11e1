import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from asyncrl.page.sample_index.filters import SORTS, Filter
from asyncrl.page.sample_index.groups import GROUPS_PER_PAGE, Group, GroupLists
from asyncrl.page.sample_index.index import SampleIndex
from asyncrl.page.sample_index.text_search import Question, TextSearch
from asyncrl.rollout_log.files import file_of
from benchmarks.page.made_up_run import RunShape, write_run

STEPS = range(12)
SHAPE = RunShape(groups=6, group_size=4, tokens=60)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SampleIndex, list[dict[str, Any]]]]:
    """An index, and all rows of its files."""
    folder = write_run(tmp_path_factory.mktemp("run"), STEPS, SHAPE)
    index = SampleIndex(folder)
    assert index.refresh(30.0).is_complete
    yield index, [row for step in STEPS for row in pq.read_table(file_of(folder, step)).to_pylist()]


def all_pages(lists: GroupLists) -> list[Group]:
    groups = lists.page(0)
    for page in range(1, -(-groups[0].total // GROUPS_PER_PAGE) if groups else 0):
        groups += lists.page(page)
    return groups


def is_chosen(row: dict[str, Any], chosen: Filter) -> bool:
    """Filter a row without SQL."""
    bounds = [
        (row["reward"], chosen.min_reward, chosen.max_reward),
        (row["lag"], chosen.min_lag, chosen.max_lag),
        (len(row["tokens"]), chosen.min_tokens, chosen.max_tokens),
        (row["step"], chosen.from_step, chosen.to_step),
        (row["row"], chosen.row, chosen.row),
    ]
    fits = all((low is None or value >= low) and (high is None or value <= high) for value, low, high in bounds)
    has_text = chosen.text.lower() in row["prompt"].lower() or chosen.text.lower() in row["response"].lower()
    return fits and has_text and chosen.finish in ("", row["finish"])


def made_filter(number: int) -> Filter:
    """Return a filter with some conditions, at random."""
    random_ = random.Random(number)
    conditions: dict[str, Any] = {
        "from_step": 3,
        "to_step": 8,
        "row": 20,
        "spread": random_.choice(("with", "without")),
        "min_reward": 0.5,
        "max_reward": 0.5,
        "min_lag": 1,
        "max_lag": 1,
        "min_tokens": 50,
        "max_tokens": 70,
        "finish": "length",
        "text": "WAIT check",
    }
    kept = random_.sample(sorted(conditions), random_.randint(0, 3))
    sort, descending = random_.choice(sorted(SORTS)), random_.random() < 0.5
    return Filter(**{name: conditions[name] for name in kept}, sort=sort, descending=descending)


@pytest.mark.parametrize("number", range(12))
def test_a_filter_lists_what_the_files_have(run: tuple[SampleIndex, list[dict[str, Any]]], number: int) -> None:
    index, rows = run
    chosen = made_filter(number)
    search = TextSearch(index.run_dir, Question(chosen.text, None, None))
    search.refresh(index.steps())
    while search.is_running:
        search.refresh(index.steps())
    groups = all_pages(GroupLists(index.cursor(), chosen, search.found() if chosen.text else None))
    rewards: dict[tuple[int, int], set[float]] = {}
    expected: dict[tuple[int, int], int] = {}
    for row in rows:
        key = (row["step"], row["group_id"])
        rewards.setdefault(key, set()).add(row["reward"])
        expected[key] = expected.get(key, 0) + is_chosen(row, chosen)
    wanted = {"with": True, "without": False}.get(chosen.spread)
    expected = {
        key: count for key, count in expected.items() if count and (wanted is None or (len(rewards[key]) > 1) == wanted)
    }
    assert {(group.step, group.group_id): group.chosen for group in groups} == expected
    assert len(groups) == len(expected)
    values = [getattr(group, SORTS[chosen.sort]) for group in groups]
    assert values == sorted(values, reverse=chosen.descending)


def test_numbers_of_a_group_are_those_of_its_samples(run: tuple[SampleIndex, list[dict[str, Any]]]) -> None:
    index, rows = run
    group = GroupLists(index.cursor(), Filter(from_step=5, to_step=5)).page(0)[0]
    samples = [row for row in rows if (row["step"], row["group_id"]) == (5, group.group_id)]
    rewards, lengths = [row["reward"] for row in samples], [len(row["tokens"]) for row in samples]
    assert (group.size, group.chosen, group.total) == (4, 4, 6)
    assert group.reward_mean == pytest.approx(sum(rewards) / 4)
    assert (group.reward_min, group.reward_max, group.length_max) == (min(rewards), max(rewards), max(lengths))
    assert group.length_mean == pytest.approx(sum(lengths) / 4)
    assert group.stopped == sum(row["finish"] == "stop" for row in samples)
    assert group.cut == 4 - group.stopped
    assert group.prompt == samples[0]["prompt"]


def test_neighbours_are_those_of_the_list(run: tuple[SampleIndex, list[dict[str, Any]]]) -> None:
    lists = GroupLists(run[0].cursor(), Filter(min_reward=0.5, sort="length", descending=False))
    keys = [(group.step, group.group_id) for group in all_pages(lists)]
    for first, second in list(pairwise(keys))[:5]:
        assert lists.around(first)[1] == second
        assert lists.around(second)[0] == first
    assert lists.around(keys[0])[0] is None
    assert lists.around(keys[-1])[1] is None
    assert lists.around((99, 0)) == (None, None)


def test_text_beyond_the_preview_is_found_by_the_search_alone(run: tuple[SampleIndex, list[dict[str, Any]]]) -> None:
    index, rows = run
    row = next(row for row in rows if len(row["response"]) > 300)
    text = row["response"][200:290]
    chosen = Filter(text=text)
    assert GroupLists(index.cursor(), chosen).page(0) == []
    search = TextSearch(index.run_dir, Question(text.upper(), 0, row["step"]))
    search.refresh(index.steps())
    while search.is_running:
        search.refresh(index.steps())
    assert (search.num_searched, search.num_steps, search.reached) == (row["step"] + 1, row["step"] + 1, 0)
    [group] = GroupLists(index.cursor(), chosen, search.found()).page(0)
    assert (group.step, group.group_id, group.chosen) == (row["step"], row["group_id"], 1)


def test_a_search_ends_at_its_time_limit(
    run: tuple[SampleIndex, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.page.sample_index.text_search.SEARCH_S", -1.0)
    search = TextSearch(run[0].run_dir, Question("wait", None, None))
    search.refresh(run[0].steps())
    while search.is_running:
        search.refresh(run[0].steps())
    assert search.is_late
    assert search.num_searched == 0
    assert search.found().num_rows == 0


def test_a_form_is_read_and_written_again() -> None:
    query = {
        "from_step": "3",
        "min_reward": "0.5",
        "text": " a'; DROP ",
        "sort": "mean",
        "order": "up",
        "spread": "with",
    }
    chosen = Filter.of(query)
    assert chosen == Filter(from_step=3, min_reward=0.5, text="a'; DROP", sort="mean", descending=False, spread="with")
    assert Filter.of(chosen.query()) == chosen


def test_entries_that_are_no_numbers_choose_all() -> None:
    wrong = {"from_step": "x", "min_reward": "nan", "sort": "step; DROP TABLE samples", "spread": "?", "row": ""}
    assert Filter.of(wrong) == Filter()
    assert Filter().query() == {}
