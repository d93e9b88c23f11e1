"""The page of a large run: seconds until it opens, and until it answers a filter.

    uv run python -m benchmarks.page                       a made-up run of 10,000 steps and a million samples
    uv run python -m benchmarks.page --steps 1000          a smaller one
    uv run python -m benchmarks.page --check               exit code 1 if a limit is exceeded

The page is started twice: without an index of the samples, and with the one that the first start has left.  With
Chromium, the time from the start of the program to the first figure of the overview is measured as well.
"""

import re
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.common.circumstances import circumstances
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.page.large_run import make_run
from benchmarks.page.program import page_of

MAX_OPEN_S = 2.0
"""Most seconds until the overview is there."""
MAX_FILTER_S = 1.0
"""Most seconds until a filter is answered."""
REPEATS = 3
INDEX_S = 1800.0
"""Limit for the index of all samples."""
LOOK_EVERY_S = 0.2
_NOTE_PAINT = """
new MutationObserver((changes, watcher) => {
  if (!document.querySelector(".drawing svg path")) return;
  watcher.disconnect();
  requestAnimationFrame(() => setTimeout(() => { window.paintedAt = performance.timeOrigin + performance.now(); }));
}).observe(document, { childList: true, subtree: true });
"""
"""Notes the time at which the first figure is on the screen; a question from outside would wait for plotly."""
FILTERS: dict[str, dict[str, str]] = {
    "all groups": {},
    "sorted by spread": {"sort": "spread"},
    "steps and reward": {"from_step": "100", "to_step": "900", "min_reward": "1"},
    "finish, lag and spread": {"finish": "length", "min_lag": "1", "spread": "with"},
    "length": {"min_tokens": "90"},
    "text": {"text": "carry one wait", "from_step": "0", "to_step": "20"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One time in seconds, with its limit if it has one."""

    what: str
    seconds: float
    limit: float | None = None


class Visitor:
    """A client with the page's cookie."""

    def __init__(self, url: str) -> None:
        self._base = "{0.scheme}://{0.netloc}".format(urlsplit(url))
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        self._opener.open(url, timeout=120).read()

    def text(self, path: str) -> str:
        """Return the page at ``path``."""
        with self._opener.open(self._base + path, timeout=120) as answer:
            return str(answer.read().decode())

    def seconds(self, path: str) -> float:
        """Return the seconds until the whole page at ``path`` is there."""
        began = time.monotonic()
        self.text(path)
        return time.monotonic() - began


def main(argv: Sequence[str]) -> int:
    """Measure what ``argv`` asks for, show it and write it; returns the exit code."""
    parser = parser_of("page", __doc__)
    add_option(parser, "--steps", int, "training steps of the run", 10_000)
    add_option(parser, "--samples", int, "samples per step", 100)
    add_option(parser, "--out", Path, "JSON file for all figures")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a limit is exceeded")
    asked = parser.parse_args(argv)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        make_run(Path(folder), steps=asked.steps, samples=asked.samples)
        console.print(f"{asked.steps:,} steps of {asked.samples} samples made in {time.monotonic() - began:.0f} s")
        found = [*without_index(Path(folder)), *with_index(Path(folder)), *drawn(Path(folder))]
    console.print(table(found))
    if asked.out:
        facts = circumstances("page", argv) | {"found": [asdict(each) for each in found]}
        asked.out.write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2))
    slow = [each for each in found if each.limit is not None and each.seconds > each.limit]
    for each in slow:
        console.print(f"too slow: {each.what}: {each.seconds:.2f} s, the limit is {each.limit:g} s")
    return 1 if slow and asked.check else 0


def without_index(folder: Path) -> Iterator[Measured]:
    """Measure the first visit of a run."""
    began = time.monotonic()
    with page_of(folder) as url:
        visitor = Visitor(url)
        yield Measured(what="first start: program and overview", seconds=time.monotonic() - began, limit=MAX_OPEN_S)
        yield Measured(what="first list of groups", seconds=visitor.seconds("/run/0/samples"))
        while not is_indexed(visitor.text("/run/0/samples")):
            if time.monotonic() - began > INDEX_S:
                raise TimeoutError(f"the index took more than {INDEX_S:g} s")
            time.sleep(LOOK_EVERY_S)
        yield Measured(what="index of all samples", seconds=time.monotonic() - began)


def with_index(folder: Path) -> Iterator[Measured]:
    """Measure a later visit."""
    began = time.monotonic()
    with page_of(folder) as url:
        visitor = Visitor(url)
        yield Measured(what="later start: program and overview", seconds=time.monotonic() - began, limit=MAX_OPEN_S)
        while not is_indexed(visitor.text("/run/0/samples")):
            time.sleep(LOOK_EVERY_S)
        yield Measured(what="index loaded", seconds=time.monotonic() - began)
        for what, query in FILTERS.items():
            times = [visitor.seconds(f"/run/0/samples?{urlencode(query)}") for _ in range(REPEATS)]
            yield Measured(what=f"filter: {what}", seconds=statistics.median(times), limit=MAX_FILTER_S)
        for tab in ("overview", "timeline", "staleness"):
            yield Measured(what=f"tab: {tab}", seconds=visitor.seconds(f"/run/0/{tab}"), limit=MAX_OPEN_S)


def is_indexed(text: str) -> bool:
    """Return whether the tab says that all steps are in the index."""
    return re.search(r"<dt>Steps in the index</dt>\s*<dd>[\d,]+</dd>", text) is not None


def drawn(folder: Path) -> Iterator[Measured]:
    """Measure the time from the start of the program to the first figure in a browser.  Nothing without Chromium.

    One browser runs already; another is started when the program has printed its address.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        return
    from playwright.sync_api import sync_playwright

    def launched() -> Any:
        return playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])

    with sync_playwright() as playwright:
        running = launched()
        times = [_opened(folder, lambda: running) for _ in range(REPEATS)]
        running.close()
        yield from _medians("a running Chromium", times)
        times = []
        for _ in range(REPEATS):
            with ExitStack() as stack:
                times.append(_opened(folder, lambda: stack.enter_context(launched())))
        yield from _medians("a new Chromium", times)


def _opened(folder: Path, browser: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds until the first figure is painted, and until it follows the pointer."""
    began = time.time()
    with page_of(folder) as url:
        context = browser().new_context()  # with an empty cache
        page = context.new_page()
        page.add_init_script(_NOTE_PAINT)
        page.goto(url, wait_until="commit")
        page.locator(".drawing svg.main-svg").first.wait_for()
        whole_s = time.time() - began
        drawn_s = page.evaluate("window.paintedAt") / 1000 - began
        context.close()
    return drawn_s, whole_s


def _medians(where: str, times: Sequence[tuple[float, float]]) -> Iterator[Measured]:
    drawn_s, whole_s = map(statistics.median, zip(*times, strict=True))
    yield Measured(what=f"overview drawn by {where}", seconds=drawn_s, limit=MAX_OPEN_S)
    yield Measured(what=f"overview follows the pointer in {where}", seconds=whole_s)


def table(found: Sequence[Measured]) -> Table:
    """A table of all times, one per line."""
    shown = Table(title="the page of a large run")
    shown.add_column("what")
    shown.add_column("seconds", justify="right")
    shown.add_column("limit", justify="right")
    for each in found:
        shown.add_row(each.what, f"{each.seconds:.2f}", "" if each.limit is None else f"{each.limit:g}")
    return shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
