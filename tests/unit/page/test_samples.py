import re
import time
import urllib.request
from collections.abc import Iterator
from html import unescape
from http.cookiejar import CookieJar
from pathlib import Path

import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from tokenizers import Tokenizer, models  # type: ignore[import-untyped]

from asyncrl.page.sample_index.step_files import read_samples
from asyncrl.rollout_log.files import file_of
from benchmarks.page.made_up_run import WORDS, RunShape, write_run, write_step
from tests.unit.page.serving import served

EVIL = "<script>alert(1)</script>&amp;"
"""Text of a model that must not become HTML."""


class Browser:
    """Opens pages of a run as a browser does."""

    def __init__(self, url: str) -> None:
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        self._opener.open(url, timeout=90).close()
        self._root = url.partition("/?")[0]

    def open(self, address: str) -> str:
        with self._opener.open(self._root + address, timeout=90) as answer:
            return str(answer.read().decode())

    def complete(self, address: str) -> str:
        """Open a page again until its index and its search are complete."""
        while "data-progress" in (page := self.open(address)):
            time.sleep(0.05)
        return page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 steps with a tokenizer; one text of the newest step looks like HTML."""
    folder = write_run(tmp_path_factory.mktemp("page") / "run", range(30), RunShape(tokens=200))
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="so"))
    (folder / "model").mkdir()
    words.save(str(folder / "model" / "tokenizer.json"))
    path = file_of(folder, 29)
    table = pq.read_table(path)
    for name in ("prompt", "response", "label"):
        values = pa.array([EVIL + text for text in table[name].to_pylist()])
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), values)
    pq.write_table(table, path)
    return folder


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Browser]:
    with served(folder) as url:
        browser = Browser(url)
        browser.complete("/run/0/samples")  # the index is complete from now on
        yield browser


def links(page: str, pattern: str) -> list[str]:
    return [unescape(found) for found in re.findall(rf'<a href="([^"]*)"[^>]*>{pattern}', page)]


def rows_of(page: str) -> int:
    return len(re.findall(r"<tr>", page)) - 1


def test_samples_of_the_lost_steps_of_a_resumed_run_are_not_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", range(6))
    with served(folder) as url:
        before = Browser(url)
        [lost, *_] = links(before.complete("/run/0/samples"), "20")  # the first group of step 5
        assert "1 to 24 of 24" in before.open("/run/0/samples")
    write_step(folder, 2, seed=7)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(orjson.dumps({"step": 2, "time/step_s": 1.0}) + b"\n")
    with served(folder) as url:  # the index of all steps is on the disk
        browser = Browser(url)
        assert "1 to 12 of 12" in browser.complete("/run/0/samples")
        assert "Steps 0 to 2: each column" in browser.complete("/run/0/staleness")
        assert "step 5 was trained before the run resumed" in browser.open(f"/run/0/samples{lost}")


def test_groups_are_listed_in_pages(browser: Browser) -> None:
    first = browser.open("/run/0/samples")
    assert "Groups 1 to 50 of 120" in first
    assert rows_of(first) == 50
    [after] = links(first, "Next page")
    second = browser.open(f"/run/0/samples{after}")
    assert "Groups 51 to 100 of 120" in second
    [before] = links(second, "Previous page")
    assert browser.open(f"/run/0/samples{before}") == first


def test_heads_sort_and_keep_the_filter(browser: Browser) -> None:
    page = browser.open("/run/0/samples?from_step=3&to_step=9")
    assert "of 28" in page
    [head] = links(page, "Mean reward")
    falling = browser.open(f"/run/0/samples{head}")
    assert 'aria-sort="descending"><a' in falling
    assert "of 28" in falling
    means = [
        float(number) for number in re.findall(r'<tr>(?:\s*<t[dh][^\n]*){3}\s*<td class="number">([\d.]+)<', falling)
    ]
    assert len(means) == 28
    assert means == sorted(means, reverse=True)
    [rising] = links(falling, "Mean reward")
    assert 'aria-sort="ascending"><a' in browser.open(f"/run/0/samples{rising}")


def test_a_search_says_how_far_it_went(browser: Browser) -> None:
    page = browser.complete("/run/0/samples?text=alert(1)&from_step=20")
    assert "all 10 chosen steps" in page
    assert "Groups 1 to 4 of 4" in page
    assert "4 of 4" in page
    assert "No group of the steps in the index matches" in browser.complete("/run/0/samples?text=nowhere")


def test_a_group_is_shown_side_by_side(browser: Browser, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.page.tabs.samples.CUT", 200)
    [row] = read_samples(folder, 28, 112, ("response", "reward", "label"), 2)
    page = browser.open("/run/0/samples?step=28&group=112")
    assert page.count('class="card"') == 4
    assert row["response"][:100] in page
    assert row["response"] not in page
    assert f"{len(row['response']) - 200:,} characters are left out here" in page
    assert f">{row['response'][-66:]}</pre>" in page
    whole = browser.open(f"/run/0/samples{links(page, 'Show whole texts')[0]}".partition("#")[0])
    assert row["response"] in whole
    assert unescape(page).count(row["label"]) == 1
    [after], [before] = links(page, "Next group"), links(page, "Previous group")
    assert "Step 28, group 113" in browser.open(f"/run/0/samples{after}")
    assert "Step 29, group 119" in browser.open(f"/run/0/samples{before}"), "newest steps are first"


def test_a_sample_is_shown_token_by_token(browser: Browser, folder: Path) -> None:
    [row] = read_samples(folder, 28, 112, ("tokens", "logprobs"), 2)
    page = browser.open("/run/0/samples?step=28&group=112&sample=2")
    assert page.count('title="token ') == len(row["tokens"]) + 12
    assert f"token 5, id {row['tokens'][5]}, engine {row['logprobs'][5]:.4f}" in page
    assert re.search(rf'title="token 5,[^>]*>\s?{WORDS[row["tokens"][5]]}<', page)
    assert "version 26 (lag 2)" in page
    [after] = links(page, "Next sample")
    assert "group 112, sample 3" in browser.open(f"/run/0/samples{after}")
    for address in links(page, "(?:mask|log-prob|trainer minus engine|advantage)<"):
        assert 'aria-current="true"' in browser.open(f"/run/0/samples{address}")
    [table] = links(page, "Show as a table")
    assert f'<td class="number">{row["logprobs"][5]:.4f}</td>' in browser.open(f"/run/0/samples{table}")


def test_long_samples_have_pages(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.page.tabs.samples.PAGE_TOKENS", 50)
    page = browser.open("/run/0/samples?step=28&group=112&sample=2&colour=logprob")
    [second, *_] = links(page, "50 to 99")
    following = browser.open(f"/run/0/samples{second}")
    assert 'title="token 50,' in following
    assert 'title="token 49,' not in following
    last = browser.open("/run/0/samples?step=28&group=112&sample=2&page=999")
    assert 'title="token ' in last


def test_text_of_a_model_is_never_html(browser: Browser) -> None:
    for address in ("", "?text=%3Cscript", "?step=29&group=116", "?step=29&group=116&sample=0"):
        page = browser.complete(f"/run/0/samples{address}")
        assert "alert(1)" in page
        assert "<script>" not in page


def test_a_group_that_is_not_there_is_named(browser: Browser) -> None:
    assert "step 28 has no samples of group 999" in browser.open("/run/0/samples?step=28&group=999")
    assert "has no sample 77 of group 112" in browser.open("/run/0/samples?step=28&group=112&sample=77")
    assert "step-000500.parquet cannot be read" in browser.open("/run/0/samples?step=500&group=1")


def test_ids_are_shown_without_a_tokenizer(tmp_path: Path) -> None:
    write_run(tmp_path, range(1))
    with served(tmp_path) as url:
        page = Browser(url).open("/run/0/samples?step=0&group=0&sample=0")
    assert f"shown as ids, because there is no tokenizer: {tmp_path / 'model' / 'tokenizer.json'}: no such file" in page
    assert re.search(r'title="token 0, id (\d+),[^>]*>\1 <', page)


def test_staleness_shows_versions_and_lags(browser: Browser, folder: Path) -> None:
    page = browser.open("/run/0/staleness?from=10&to=19")
    titles = re.findall(r"<h2 [^>]*>([^<]*)</h2>", page)
    assert titles == [
        "Trained tokens by lag",
        "Mean lag",
        "Versions that wrote each step",
        "Log-prob difference by lag",
        "Log-prob difference against lag",
    ]
    assert "Steps 10 to 19:" in page
    assert re.search(r'<th scope="row">lag 2</th><td class="number">[\d,]+</td><td class="number">4\d\.\d%', page)


def test_a_run_without_files_of_samples_says_why(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "lag/mean": 0.5}\n')
    with served(tmp_path) as url:
        browser = Browser(url)
        for tab in ("samples", "staleness"):
            assert "--rollout-log-share 0" in browser.complete(f"/run/0/{tab}")
        assert "Mean lag" in browser.open("/run/0/staleness")


def test_a_skipped_file_is_named_in_both_tabs(tmp_path: Path) -> None:
    write_run(tmp_path, range(2))
    write_step(tmp_path, 2).write_bytes(b"torn")
    with served(tmp_path) as url:
        browser = Browser(url)
        for tab in ("samples", "staleness"):
            page = browser.complete(f"/run/0/{tab}")
            assert "step-000002.parquet cannot be read" in page
            assert "<dd>2</dd>" in page
