import itertools
import json
from inspect import signature
from pathlib import Path
from typing import Any

from asyncrl.metrics.timeline import NoTimeline, Timeline, TimelineFile, parts_of
from asyncrl.types import FinishReason
from tests.full_disks import file_size_limit


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def events_of_a_killed_run(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text() + "]")
    return found


def record(timeline: Timeline) -> None:
    timeline.span("trainer", "step 0", 101.0, 103.5, tokens=12)
    timeline.span("engines", "pause", 103.5, 103.75)
    timeline.sample(0, "g0/1", 100.5, 103.0, group=0, index=1, tokens=40, version=0, finish=FinishReason.STOP)
    timeline.counter("samples in flight", 103.0, 7)


def test_a_closed_timeline_is_valid_json_with_named_tracks(tmp_path: Path) -> None:
    timeline = TimelineFile(tmp_path, origin_s=100.0)
    record(timeline)
    timeline.close()
    timeline.close()
    names = {e["args"]["name"]: e["pid"] for e in events(tmp_path / "timeline.json") if e["name"] == "process_name"}
    assert names == {"trainer": 1, "engines": 2, "evaluation": 3, "samples in flight": 4}


def test_times_are_microseconds_since_the_origin(tmp_path: Path) -> None:
    timeline = TimelineFile(tmp_path, origin_s=100.0)
    record(timeline)
    timeline.close()
    by_name = {event["name"]: event for event in events(tmp_path / "timeline.json")}
    assert (by_name["step 0"]["ph"], by_name["step 0"]["ts"], by_name["step 0"]["dur"]) == ("X", 1_000_000, 2_500_000)
    assert by_name["g0/1"]["args"] == {"group": 0, "index": 1, "tokens": 40, "version": 0, "finish": "stop"}
    assert by_name["samples in flight"] == {
        "ph": "C",
        "name": "samples in flight",
        "pid": 4,
        "ts": 3_000_000,
        "args": {"value": 7},
    }


def test_each_slot_is_a_lane_that_is_named_once(tmp_path: Path) -> None:
    timeline = TimelineFile(tmp_path, origin_s=0.0)
    for start in range(3):
        timeline.sample(0, "a", start, start + 1)
        timeline.sample(5, "b", start, start + 1)
    timeline.close()
    found = events(tmp_path / "timeline.json")
    lanes = [(e["tid"], e["args"]["name"]) for e in found if e["name"] == "thread_name" and e["pid"] == 4]
    assert lanes == [(1, "slot 0"), (6, "slot 5")]
    assert [e["tid"] for e in found if e["ph"] == "X"] == [1, 6] * 3


def test_neighbours_touch_and_never_overlap(tmp_path: Path) -> None:
    timeline = TimelineFile(tmp_path, origin_s=0.1)
    edges = [0.1 + number / 7 for number in range(50)]
    for start, stop in itertools.pairwise(edges):
        timeline.sample(0, "sample", start, stop)
    timeline.close()
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events(tmp_path / "timeline.json") if e["ph"] == "X"]
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(spans))


def test_a_killed_run_leaves_a_file_that_lacks_only_its_bracket(tmp_path: Path) -> None:
    timeline = TimelineFile(tmp_path, origin_s=0.0)
    for number in range(10):
        timeline.span("trainer", f"step {number}", number, number + 1)
    found = [event["name"] for event in events_of_a_killed_run(tmp_path / "timeline.json") if event["ph"] == "X"]
    assert found == [f"step {number}" for number in range(10)][: len(found)]
    assert len(found) >= 9  # events older than two seconds are on disk
    timeline.close()


def test_a_burst_of_events_is_written_before_it_grows(tmp_path: Path) -> None:
    timeline = TimelineFile(tmp_path, origin_s=0.0)
    sizes = []
    for _ in range(2000):
        timeline.counter("samples in flight", 0.5, 1)
        sizes.append((tmp_path / "timeline.json").stat().st_size)
    timeline.close()
    assert max(after - before for before, after in itertools.pairwise(sizes)) < 66_000
    assert len(set(sizes)) == 3


def test_a_resumed_run_leaves_the_first_timeline_alone(tmp_path: Path) -> None:
    for _ in range(2):
        TimelineFile(tmp_path, origin_s=0.0).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["timeline-2.json", "timeline.json"]


def test_the_timeline_that_is_off_takes_the_same_calls() -> None:
    record(NoTimeline())
    NoTimeline().close()
    for name in ("span", "sample", "counter", "close"):
        assert signature(getattr(NoTimeline, name)) == signature(getattr(TimelineFile, name))


def test_a_long_timeline_has_parts_each_of_which_opens_alone(tmp_path: Path) -> None:
    timeline = TimelineFile(tmp_path, origin_s=0.0, part_bytes=100_000)
    for number in range(3000):
        timeline.sample(number % 3, f"g{number}", number, number + 1)
    timeline.close()
    parts = parts_of(tmp_path / "timeline.json")
    assert len(parts) > 2
    assert all(part.stat().st_size < 100_000 + 70_000 for part in parts)
    found = [[event["name"] for event in events(part) if event["ph"] == "X"] for part in parts]
    assert list(itertools.chain.from_iterable(found)) == [f"g{number}" for number in range(3000)]
    for part in parts:
        named = {event["args"]["name"] for event in events(part) if event["ph"] == "M" and "name" in event["args"]}
        assert {"trainer", "samples in flight", "slot 0"} <= named


def test_the_first_part_and_the_newest_ones_stay(tmp_path: Path) -> None:
    timeline = TimelineFile(tmp_path, origin_s=0.0, part_bytes=100_000, most_parts=3)
    for number in range(8000):
        timeline.sample(0, f"g{number}", number, number + 1)
    timeline.close()
    parts = parts_of(tmp_path / "timeline.json")
    assert len(parts) > 5
    assert [part.exists() for part in parts] == [True, *[False] * (len(parts) - 3), True, True]


def test_a_full_disk_costs_events_and_leaves_a_timeline_that_opens(tmp_path: Path) -> None:
    timeline = TimelineFile(tmp_path, origin_s=0.0)
    with file_size_limit(5_000):
        for number in range(5000):
            timeline.span("trainer", f"early {number}", number, number + 0.5)
    for number in range(100):
        timeline.span("trainer", f"late {number}", 5000 + number, 5000.5 + number)
    timeline.close()
    found = [event["name"] for event in events(tmp_path / "timeline.json") if event["ph"] == "X"]
    assert found[-1] == "late 99"
    assert {"early 0", "late 50"} <= set(found)
    assert len(found) < 5000
