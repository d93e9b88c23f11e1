"""Reading a timeline, and its sums over time."""

import itertools
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from asyncrl.metrics.timeline import TimelineFile, parts_of
from asyncrl.page.spans.activities import ACTIVITIES, GENERATE, IDLE, PAUSED
from asyncrl.page.spans.lanes import lanes_in, shares_in, totals
from asyncrl.page.spans.recording import Recording, Snapshot, timelines_in
from asyncrl.page.spans.summing import engine_states, seconds_in
from asyncrl.page.spans.window import Window, clock, ticks, window_of
from benchmarks.page.made_timeline import SLOTS, STEP_S, write_timeline

PATIENCE_S = 180.0


def read(path: Path) -> tuple[Recording, Snapshot]:
    recording = Recording(path)
    recording.refresh(PATIENCE_S)
    return recording, recording.snapshot()


@pytest.mark.parametrize("close", [True, False])
def test_all_spans_of_finished_and_killed_runs_are_read(tmp_path: Path, close: bool) -> None:
    write_timeline(tmp_path, steps=20, close=close)
    recording, seen = read(tmp_path / "timeline.json")
    assert len(seen.samples["start"]) == 20 * SLOTS + 2
    assert list(seen.steps) == list(range(20))
    assert seen.steps[3] == (35.0, 39.0)
    assert (seen.first_s, seen.last_s) == (0.0, 20 * STEP_S)
    progress = recording.progress()
    assert (progress.is_reading, progress.num_removed) == (False, 0)
    assert progress.read_bytes >= progress.total_bytes - 3  # all but the closing bracket


def test_only_what_was_appended_is_read_again(tmp_path: Path) -> None:
    write_timeline(tmp_path / "whole", steps=30)
    data = (tmp_path / "whole" / "timeline.json").read_bytes()
    path = tmp_path / "timeline.json"
    recording = Recording(path)
    path.touch()
    for end in [*range(0, len(data), 20_011), len(data)]:  # any byte may be the last one of an event
        with path.open("ab") as file:
            file.write(data[path.stat().st_size : end])
        before = recording.snapshot()
        recording.refresh(PATIENCE_S)
        assert len(recording.snapshot().samples["start"]) >= len(before.samples["start"])
    _, whole = read(tmp_path / "whole" / "timeline.json")
    for table in ("spans", "samples"):
        for name, column in getattr(whole, table).items():
            np.testing.assert_array_equal(getattr(recording.snapshot(), table)[name], column)
    assert recording.snapshot().texts == whole.texts


def test_a_snapshot_stays_as_it_was(tmp_path: Path) -> None:
    timeline = TimelineFile(tmp_path, 0.0)
    for number in range(20_000):
        timeline.sample(0, f"g{number}.0", number * 1e-5, (number + 1) * 1e-5, tokens=1, version=0, finish="stop")
    recording, before = read(tmp_path / "timeline.json")
    assert recording.snapshot() is before
    starts = before.samples["start"].copy()
    timeline.close()
    recording.refresh(PATIENCE_S)
    assert len(recording.snapshot().samples["start"]) == 20_000 > len(starts)
    np.testing.assert_array_equal(before.samples["start"], starts)


def test_a_timeline_in_parts_reads_as_one_and_a_removed_part_is_counted(tmp_path: Path) -> None:
    write_timeline(tmp_path / "whole", steps=60)
    write_timeline(tmp_path / "parts", steps=60, part_bytes=100_000)
    parts = parts_of(tmp_path / "parts" / "timeline.json")
    assert len(parts) > 3
    _, whole = read(tmp_path / "whole" / "timeline.json")
    recording, seen = read(parts[0])
    np.testing.assert_array_equal(seen.samples["start"], whole.samples["start"])
    names = [event["name"] for event in recording.events_of(np.array([0, len(seen.samples["start"]) - 1]))]
    assert names == ["g0.0", f"g{60 * SLOTS // 8 - 1}.7"]
    parts[1].unlink()
    recording, seen = read(parts[0])
    assert recording.progress().num_removed == 1
    assert 0 < len(seen.samples["start"]) < len(whole.samples["start"])


def test_a_file_that_was_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    write_timeline(tmp_path, steps=10)
    recording, _ = read(tmp_path / "timeline.json")
    write_timeline(tmp_path / "other", steps=3)
    (tmp_path / "other" / "timeline.json").replace(tmp_path / "timeline.json")
    recording.refresh(PATIENCE_S)
    assert list(recording.snapshot().steps) == [0, 1, 2]


def test_a_torn_line_costs_its_event_alone(tmp_path: Path) -> None:
    write_timeline(tmp_path, steps=2)
    path = tmp_path / "timeline.json"
    lines = path.read_bytes().split(b"\n")
    place = next(number for number, line in enumerate(lines) if b'"g3.' in line)
    lines[place] = lines[place][:40]
    path.write_bytes(b"\n".join(lines))
    assert len(read(path)[1].samples["start"]) == 2 * SLOTS + 1 - 1


DAMAGES: Sequence[tuple[bytes, bytes]] = (
    *((b'"%b":' % name, b'"x%b":' % name) for name in (b"ph", b"name", b"ts", b"dur", b"pid", b"tid", b"args")),
    (b'"ts":', b'"ts":null,"was":'),
    (b'"dur":', b'"dur":[],"was":'),
    (b'"name":', b'"name":3,"was":'),
    (b'"tid":', b'"tid":9999999999,"was":'),
    (b'"args":', b'"args":null,"was":'),
)


@pytest.mark.parametrize("name", [b'"step 1"', b'"g3.1"'])
@pytest.mark.parametrize(("part", "damaged"), DAMAGES)
def test_an_event_without_a_part_of_a_span_costs_itself_alone(
    tmp_path: Path, name: bytes, part: bytes, damaged: bytes
) -> None:
    write_timeline(tmp_path, steps=2)
    path = tmp_path / "timeline.json"
    _, before = read(path)
    lines = path.read_bytes().split(b"\n")
    place = next(number for number, line in enumerate(lines) if name in line)
    lines[place] = lines[place].replace(part, damaged, 1)
    path.write_bytes(b"\n".join(lines))
    recording, seen = read(path)
    counts = len(seen.spans["start"]), len(seen.samples["start"])
    assert sum(counts) == len(before.spans["start"]) + len(before.samples["start"]) - 1
    recording.refresh(PATIENCE_S)
    assert recording.snapshot() is seen, "the block is not read again"
    starts = [event["ts"] / 1e6 for event in recording.events_of(np.arange(counts[1]))]
    assert starts == seen.samples["start"].tolist()


@pytest.mark.parametrize("line", [b"null,", b"3,", b'"text",'])
def test_a_line_of_json_that_is_no_event_is_skipped(tmp_path: Path, line: bytes) -> None:
    write_timeline(tmp_path, steps=2)
    path = tmp_path / "timeline.json"
    path.write_bytes(path.read_bytes().replace(b"[\n", b"[\n" + line + b"\n", 1))
    assert list(read(path)[1].steps) == [0, 1]


def test_names_and_arguments_of_samples_are_read_again(tmp_path: Path) -> None:
    write_timeline(tmp_path, steps=200)
    recording, seen = read(tmp_path / "timeline.json")
    places = np.flatnonzero((seen.samples["start"] > 1505) | (seen.samples["slot"] == 3))
    for place, event in zip(places.tolist(), recording.events_of(places), strict=True):
        assert event["ts"] == round(seen.samples["start"][place] * 1e6)
        assert event["tid"] == seen.samples["slot"][place] + 1
    os.unlink(tmp_path / "timeline.json")
    assert recording.events_of(places[:2]) == [{}, {}]


def test_the_newest_timeline_of_a_resumed_run_is_first(tmp_path: Path) -> None:
    for name in (
        "timeline.json",
        "timeline.part2.json",
        "timeline-2.json",
        "timeline-10.json",
        "timeline-2.part3.json",
    ):
        (tmp_path / name).touch()
    assert [path.name for path in timelines_in(tmp_path)] == ["timeline-10.json", "timeline-2.json", "timeline.json"]


def test_seconds_in_bins_are_those_of_each_span() -> None:
    draw = random.Random(7)
    starts = np.array([draw.uniform(-5, 30) for _ in range(300)])
    stops = starts + np.array([draw.expovariate(0.5) for _ in range(300)])
    edges = np.linspace(0.0, 20.0, 23)
    expected = [
        sum(max(0.0, min(stop, high) - max(start, low)) for start, stop in zip(starts, stops, strict=True))
        for low, high in itertools.pairwise(edges)
    ]
    np.testing.assert_allclose(seconds_in(starts, stops, edges), expected, atol=1e-9)
    assert seconds_in(np.empty(0), np.empty(0), edges).sum() == 0


def test_engines_generate_pause_or_have_nothing_to_do() -> None:
    samples = np.array([0.0, 1.0, 6.0]), np.array([2.0, 4.0, 9.0])
    pauses = np.array([3.0, 5.0]), np.array([3.5, 5.5])
    seen = engine_states(samples, pauses)
    spans = list(zip(seen.starts.tolist(), seen.stops.tolist(), seen.kinds.tolist(), strict=True))
    assert spans == [
        (0.0, 3.0, GENERATE),
        (3.0, 3.5, PAUSED),
        (3.5, 4.0, GENERATE),
        (4.0, 5.0, IDLE),
        (5.0, 5.5, PAUSED),
        (5.5, 6.0, IDLE),
        (6.0, 9.0, GENERATE),
    ]
    assert len(engine_states((np.empty(0), np.empty(0)), pauses).kinds) == 0


@pytest.mark.parametrize("window", [Window(start_s=0, stop_s=200), Window(start_s=50, stop_s=60)])
def test_totals_are_those_of_the_made_up_run(tmp_path: Path, window: Window) -> None:
    write_timeline(tmp_path, steps=20)
    _, seen = read(tmp_path / "timeline.json")
    shares = {each.label: each.share for each in totals(lanes_in(seen, window), window)}
    assert shares["trains"] == pytest.approx(0.4)
    assert shares["waits for a batch"] == pytest.approx(0.5)
    assert shares["copies weights"] == pytest.approx(0.02)
    assert shares["update"] == pytest.approx(0.05)
    assert shares["generate"] + shares["paused for new weights"] + shares["no sample in flight"] == pytest.approx(
        1.0, abs=0.01
    )
    assert shares["training samples"] == pytest.approx(0.87 * SLOTS)


def test_the_sum_over_bins_is_the_total(tmp_path: Path) -> None:
    write_timeline(tmp_path, steps=50)
    _, seen = read(tmp_path / "timeline.json")
    window = Window(start_s=13.0, stop_s=417.0)
    edges = np.linspace(window.start_s, window.stop_s, 101)
    for lane in lanes_in(seen, window):
        for kind, shares in shares_in(lane, edges).items():
            total = next(each for each in totals([lane], window) if each.label == ACTIVITIES[kind].label)
            assert float(shares.mean()) == pytest.approx(total.share)


def test_a_window_is_named_by_the_address(tmp_path: Path) -> None:
    write_timeline(tmp_path, steps=20)
    _, seen = read(tmp_path / "timeline.json")
    whole = Window(start_s=0.0, stop_s=200.0)
    assert window_of({}, seen) == whole
    assert window_of({"last": "30"}, seen) == Window(start_s=170.0, stop_s=200.0)
    assert window_of({"last": "1e9"}, seen) == whole
    assert window_of({"from": "3.5", "to": "4"}, seen) == Window(start_s=3.5, stop_s=4.0)
    assert window_of({"step": "3"}, seen) == Window(start_s=28.0, stop_s=40.0)
    assert window_of({"step": "newest"}, seen) == window_of({"step": "19"}, seen)


@pytest.mark.parametrize(
    "query", [{"from": "4", "to": "3"}, {"from": "nan", "to": "3"}, {"step": "99"}, {"step": "x"}, {"last": "a"}]
)
def test_an_invalid_window_is_the_whole_run(tmp_path: Path, query: dict[str, str]) -> None:
    write_timeline(tmp_path, steps=2)
    _, seen = read(tmp_path / "timeline.json")
    assert window_of(query, seen) == Window(start_s=0.0, stop_s=20.0)


def test_times_are_round_and_have_the_digits_that_they_need() -> None:
    assert [text for _, text in ticks(Window(start_s=0, stop_s=7200))][:3] == ["0:00", "15:00", "30:00"]
    assert [text for _, text in ticks(Window(start_s=59.9, stop_s=60.5))][:3] == ["0:59.9", "1:00.0", "1:00.1"]
    assert clock(3661.25, 0.01) == "1:01:01.25"
    assert clock(-2.0) == "-0:02"
    assert len(list(ticks(Window(start_s=0, stop_s=1e7)))) <= 12
