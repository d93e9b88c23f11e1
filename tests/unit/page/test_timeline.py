"""The tab *Timeline*."""

import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import orjson
import pytest

from asyncrl.page.runs.run_files import RunFiles, open_runs
from asyncrl.page.tabs import timeline
from asyncrl.page.tabs.tab import PageRequest
from benchmarks.page.made_timeline import SLOTS, write_timeline
from tests.unit.page.made_runs import write_run
from tests.unit.page.serving import served


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFiles:
    monkeypatch.setattr(timeline, "PATIENCE_S", 60.0)
    write_timeline(write_run(tmp_path / "run"), steps=200)
    return open_runs([tmp_path / "run"])[0]


def shown(run: RunFiles, **query: str) -> dict[str, Any]:
    """The answer that the script gets."""
    found = timeline.spans(PageRequest(run=run, query=query))
    values: dict[str, Any] = orjson.loads(orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY))
    return values


def traces(values: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [trace for trace in values["figure"]["data"] if trace.get("name") == name]


def test_a_long_view_shows_shares_of_time(run: RunFiles) -> None:
    values = shown(run)
    (trains,) = traces(values, "trains")
    assert 50 <= len(trains["x"]) <= 400
    assert sum(trains["y"]) / len(trains["y"]) == pytest.approx(0.4, abs=0.01)
    assert ["trainer", "trains", "800.00", "40 %", "200"] in values["rows"]
    assert ["Trainer waits for a batch", "50 %"] in values["facts"]
    assert not values["is_reading"]


def test_a_close_view_shows_single_spans_and_samples_with_their_names(run: RunFiles) -> None:
    values = shown(run, step="42")
    (trains,) = traces(values, "trains")
    assert [text.split("<br>")[0] for text in trains["hovertext"]] == ["<b>step 41</b>", "<b>step 42</b>"]
    assert "tokens: 6,400" in trains["hovertext"][0]
    (slots,) = [trace for trace in values["figure"]["data"] if trace.get("orientation") == "h"]
    assert len(slots["x"]) >= SLOTS
    assert any("version: 42" in text for text in slots["hovertext"])
    numbers = [note["text"] for note in values["figure"]["layout"]["annotations"]]
    assert numbers == ["step 41", "42"]


def test_damaged_names_and_versions_are_shown(run: RunFiles) -> None:
    path = run.path / "timeline.json"
    data = path.read_bytes()
    for before, after in ((b'"version":42', b'"version":"x"'), (b'"weights taken"', b'"weights\\ntaken"')):
        assert before in data
        data = data.replace(before, after)
    path.write_bytes(data)
    assert any("version: x" in text for trace in shown(run, step="42")["figure"]["data"] for text in _texts(trace))
    assert "other work" in [row[1] for row in shown(run)["rows"]]


def _texts(trace: dict[str, Any]) -> list[str]:
    return list(trace.get("hovertext", []))


def test_the_neighbours_of_a_window_have_addresses(run: RunFiles) -> None:
    links = shown(run, **{"from": "100", "to": "200"})["links"]
    assert links == {
        "Earlier": "?from=50.00&to=150.00",
        "Later": "?from=150.00&to=250.00",
        "Closer": "?from=125.00&to=175.00",
        "Wider": "?from=50.00&to=250.00",
    }


def test_text_of_a_timeline_is_no_html(run: RunFiles) -> None:
    path = run.path / "timeline.json"
    path.write_bytes(path.read_bytes().replace(b'"wait for a batch"', b'"<a href=x>"', 1))
    values = shown(run, **{"from": "0", "to": "9"})
    assert traces(values, "other work")[0]["hovertext"][0].startswith("<b>&lt;a href=x></b>")


def test_the_page_answers_before_a_long_timeline_was_read(run: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "PATIENCE_S", 0.0)
    first = shown(run)
    assert first["is_reading"]
    assert first["progress"].startswith("Reading the timeline: ")
    monkeypatch.setattr(timeline, "PATIENCE_S", 60.0)
    assert shown(run)["progress"] == ""


def test_a_resumed_run_has_a_choice(run: RunFiles) -> None:
    write_timeline(run.path, steps=3)
    assert shown(run)["to"] == 30.0
    first = timeline.show(PageRequest(run=run, query={"timeline": "timeline.json"}))
    assert (first["chosen"], first["shown"]["to"]) == ("timeline.json", 2000.0)
    assert first["shortcuts"]["Last hour"] == "?timeline=timeline.json&last=3600"


def test_a_run_without_a_timeline_gets_a_sentence(tmp_path: Path) -> None:
    (run,) = open_runs([write_run(tmp_path / "run")])
    assert "--no-timeline" in timeline.show(PageRequest(run=run))["missing"]


def test_an_empty_timeline_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "PATIENCE_S", 60.0)
    write_timeline(write_run(tmp_path / "run"), steps=0, close=False)
    (run,) = open_runs([tmp_path / "run"])
    assert shown(run)["rows"] == []


def test_the_tab_is_served(run: RunFiles) -> None:
    with served(run.path) as url:
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        opener.open(url, timeout=90).read()
        base = url.partition("/?")[0]
        page = opener.open(f"{base}/run/0/timeline?step=7", timeout=90).read().decode()
        assert '<input type="number" name="step" min="0" size="6" value="7">' in page
        assert '<script src="/static/timeline.js?v=' in page
        assert '<th scope="row">trainer</th><td>trains</td>' in page
        answer = orjson.loads(opener.open(f"{base}/run/0/timeline/data/spans?from=0&to=50", timeout=90).read())
        assert (answer["from"], answer["to"]) == (0.0, 50.0)
