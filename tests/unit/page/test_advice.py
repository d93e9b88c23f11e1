"""The tab *Advice*, and the studies behind it."""

import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from asyncrl.errors import DataError
from asyncrl.page.advising.advice import Advice
from asyncrl.page.advising.job import ADVICE_FILE, PAGE_FOLDER, Job
from asyncrl.page.advising.stretch import MOST_STEPS, stretch_of
from asyncrl.page.advising.study import PLANS, Plan, study
from asyncrl.page.runs.run_files import open_runs
from asyncrl.page.tabs import advice
from asyncrl.page.tabs.tab import PageRequest
from asyncrl.sim.model.world import Setting
from benchmarks.page.made_timeline import write_timeline
from tests.sim.made_run import run_in
from tests.unit.page.made_runs import write_run
from tests.unit.page.serving import opened, served

TINY = Plan(short_steps=2, steps=3, seeds=1, stalenesses=(1,))
PATIENCE_S = 360.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Setting]:
    """A run on two GPUs with known constants, S = 2 and k = 1."""
    folder = tmp_path_factory.mktemp("advice") / "run"
    return folder, run_in(folder, staleness=2, interval=1, slots=8, groups=2)


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


@pytest.fixture(scope="module")
def found(run: tuple[Path, Setting], pool: Executor) -> tuple[Advice, list[str]]:
    """A study of the run, and what it said meanwhile."""
    said: list[str] = []
    plans = [TINY]
    return study(run[0] / "timeline.json", settings_of(run[0]), pool, 1, said.append, plans), said


def settings_of(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "run.toml").read_text())


def test_the_replay_of_a_run_that_the_model_describes_is_close(found: tuple[Advice, list[str]]) -> None:
    replay = found[0].replay
    assert abs(replay.error) < 0.1
    assert replay.num_steps >= 8
    assert not replay.is_prompt_measured


def test_a_study_compares_policies_with_the_setting_of_the_run(found: tuple[Advice, list[str]]) -> None:
    values, said = found
    assert [row.name for row in values.rows] == ["sync", "wait S=1", "wait S=2"]
    now = values.now
    assert (now.staleness, now.interval, now.slots, now.times_now) == (2, 1, 8, 1.0)
    assert values.rows[0].times_now < 1.0  # synchronous steps are slower in this run
    assert values.lines[0].startswith("With this run's setting (S=2, k=1, N=8), the model trains ")
    assert "take --max-staleness" in values.lines[-1]
    assert said[0] == "Reading the newest steps of the run."
    assert said[-1].startswith("Simulating other settings: ")


def test_the_result_is_shown_with_its_trust_first(
    run: tuple[Path, Setting], found: tuple[Advice, list[str]], tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run", 25)
    (folder / "timeline.json").write_text("[]")
    (folder / PAGE_FOLDER).mkdir()
    (folder / PAGE_FOLDER / ADVICE_FILE).write_bytes(orjson.dumps(replace(found[0], num_steps=20)))
    with served(folder) as url:
        page = opened(f"{url.partition('/?')[0]}/run/0/advice?{url.partition('?')[2]}")
    assert page.index("How far to trust it") < page.index("The best setting of each policy")
    assert "the simulator describes this run well" in page
    assert "Computed after 20 steps" in page
    assert "the run has 5 more steps by now" in page
    assert page.count('<th scope="row">') == 4


def test_an_advice_is_read_back_as_it_was_written(found: tuple[Advice, list[str]]) -> None:
    written = orjson.loads(orjson.dumps(found[0]))
    assert Advice.of(written) == found[0]
    assert Advice.of(written | {"later": 1}) == found[0]


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"replay": {"error": 0.1}}', "no JSON"])
def test_a_file_that_is_no_advice_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / PAGE_FOLDER).mkdir()
    (tmp_path / PAGE_FOLDER / ADVICE_FILE).write_text(text)
    assert Job(tmp_path).advice is None


@pytest.mark.parametrize(("error", "words"), [(0.05, "well"), (-0.2, "hint"), (0.6, "worth little")])
def test_a_bad_replay_is_said(error: float, words: str) -> None:
    assert words in advice.trust(error)


def test_a_long_run_is_calibrated_on_its_newest_steps(tmp_path: Path) -> None:
    write_timeline(write_run(tmp_path / "run", 90), steps=90)
    seen = stretch_of(tmp_path / "run" / "timeline.json", {"update-weights-interval": 1})
    assert [step.step for step in seen.steps] == list(range(MOST_STEPS))
    assert [row["step"] for row in seen.rows] == list(range(MOST_STEPS))
    assert seen.steps[0].start_s == 6.0  # 5 s of waiting after the end of the step before, and 1 s of pause
    assert len(seen.updates) == MOST_STEPS
    assert min(seen.lengths)[0] <= 0
    assert {(group, index) for group in range(8) for index in range(8)} <= seen.lengths.keys()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"colocate": True}, "does not model trainer and engines on the same GPUs"),
        ({"agent-command": "agent"}, "does not model episodes of an agent"),
        ({"max-staleness": 8}, "the run has 10 finished steps in its timeline, at least 16 are needed"),
    ],
)
def test_what_cannot_be_calibrated_on_gets_a_sentence(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    write_timeline(write_run(tmp_path / "run", 10), steps=10)
    with pytest.raises(DataError, match=words):
        stretch_of(tmp_path / "run" / "timeline.json", settings)


def test_a_run_that_lost_an_engine_gets_a_sentence(run: tuple[Path, Setting], tmp_path: Path, pool: Executor) -> None:
    rows = [
        orjson.loads(line) | {"engines/serving": 0} for line in (run[0] / "metrics.jsonl").read_bytes().split(b"\n")
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    (tmp_path / "timeline.json").write_bytes((run[0] / "timeline.json").read_bytes())
    with pytest.raises(DataError, match="only 0 of 1 engines served"):
        study(tmp_path / "timeline.json", settings_of(run[0]), pool, 1, list[str]().append, [TINY])


def test_a_search_that_cannot_end_in_time_is_not_begun(run: tuple[Path, Setting], pool: Executor) -> None:
    endless = Plan(short_steps=10**9, steps=1, seeds=1, stalenesses=(1,))
    with pytest.raises(DataError, match="the search would take about"):
        study(run[0] / "timeline.json", settings_of(run[0]), pool, 1, list[str]().append, [endless])


def test_plans_become_smaller() -> None:
    sizes = [plan.samples(64) for plan in PLANS]
    assert sizes == sorted(sizes, reverse=True)


def test_a_plan_has_whole_cycles_of_updates() -> None:
    assert (TINY.in_cycles(4).short_steps, TINY.in_cycles(4).steps) == (4, 4)
    assert PLANS[0].in_cycles(4) == PLANS[0]


def ended(job: Job) -> str:
    give_up = time.monotonic() + PATIENCE_S
    while job.progress.is_running and time.monotonic() < give_up:
        time.sleep(0.02)
    return job.progress.text


def test_a_study_in_its_process_answers_with_a_sentence(tmp_path: Path) -> None:
    write_timeline(write_run(tmp_path / "run", 3), steps=3)
    job = Job(tmp_path / "run")
    job.start(tmp_path / "run" / "timeline.json", {"update-weights-interval": 1}, 3)
    assert job.progress.is_running
    assert ended(job) == "There is no advice: the run has 3 finished steps in its timeline, at least 9 are needed."
    assert job.advice is None


def test_a_study_has_a_deadline(tmp_path: Path) -> None:
    job = Job(tmp_path, deadline_s=0.1)
    job.start(tmp_path / "timeline.json", {}, 3)
    assert ended(job) == "There is no advice: the simulator did not end within 0 s."


def test_the_button_starts_one_study_however_often_its_address_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []
    monkeypatch.setattr(Job, "start", lambda job, timeline, settings, steps: started.append(timeline))
    write_timeline(write_run(tmp_path / "run"), steps=1)
    (run,) = open_runs([tmp_path / "run"])
    now = int(time.time())
    advice.show(PageRequest(run=run))
    assert not started
    advice.show(PageRequest(run=run, query={"asked": str(now)}))
    assert started == [tmp_path / "run" / "timeline.json"]
    advice.job_of(run).answered = time.time()
    for asked in (str(now), "x", "1000"):
        advice.show(PageRequest(run=run, query={"asked": asked}))
    assert len(started) == 1


def test_a_run_without_a_timeline_gets_a_sentence(tmp_path: Path) -> None:
    (run,) = open_runs([write_run(tmp_path / "run")])
    assert "--no-timeline" in advice.show(PageRequest(run=run))["problem"]
