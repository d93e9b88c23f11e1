"""The site builds in strict mode, fetches nothing from outside, and has what the code has."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from asyncrl.config.knobs import knobs
from asyncrl.metrics.names import METRICS
from asyncrl.rollout_log.files import schema
from tests.unit.website.blocks import ROOT
from website.api import SECTIONS
from website.links import Places, anchor_of, rewritten, website_of
from website.results import result_files

FETCHES = {
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}
"""The attributes that make a browser fetch something, by element."""
OUTSIDE = re.compile(r"\s*(?:\w+:)?//")
STYLE_URL = re.compile(r"(?:url\(|@import)\s*[\"']?\s*((?:\w+:)?//[^\"')\s]+)")
pytestmark = pytest.mark.timeout(900)


class Fetched(HTMLParser):
    """Collects what a browser fetches for a page, from other places than the site's."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            if name in FETCHES.get(tag, ()) and OUTSIDE.match(value or "") and ("rel", "canonical") not in attrs:
                self.urls.append(value or "")
            if name == "style":
                self.urls += STYLE_URL.findall(value or "")
            if name == "class" and "mermaid" in (value or "").split():
                self.urls.append("mermaid, which the theme fetches")


def read(html: str) -> Fetched:
    parser = Fetched()
    parser.feed(html)
    return parser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once for all tests."""
    folder = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder))
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_fetches_nothing_from_outside(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 80
    outside = [f"{page.relative_to(site)}: {url}" for page in pages for url in read(page.read_text()).urls]
    styles = [*site.rglob("*.css"), *site.rglob("*.svg")]
    outside += [f"{path.name}: {url}" for path in styles for url in STYLE_URL.findall(path.read_text())]
    assert outside == []


def test_the_reference_has_every_flag_metric_and_column(site: Path) -> None:
    shown = {name: (site / "reference" / f"{name}.html").read_text() for name in ("flags", "metrics", "files", "api")}
    assert [name for name in knobs() if f"<code>--{name}</code>" not in shown["flags"]] == []
    assert [each.name for each in METRICS if f"<code>{each.name}</code>" not in shown["metrics"]] == []
    assert [field.name for field in schema() if f"<code>{field.name}</code>" not in shown["files"]] == []
    objects = read(shown["api"]).ids
    assert [name for names in SECTIONS.values() for name in names if name not in objects] == []


def test_every_measurement_is_in_the_site(site: Path) -> None:
    listed = (site / "results" / "index.html").read_text()
    pages = [path.stem for path in result_files(ROOT) if path.suffix == ".md"]
    assert [name for name in pages if f'href="{name}.html"' not in listed] == []
    assert [name for name in pages if not (site / "results" / f"{name}.html").is_file()] == []
    newest = sorted(re.findall(r"<td>(\d{4}-\d\d-\d\d)</td>", listed), reverse=True)
    assert re.findall(r"<td>(\d{4}-\d\d-\d\d)</td>", listed) == newest


# ---- links


PLACES = Places(
    root=ROOT,
    address="https://example.org/asyncrl",
    in_site={"docs/running.md": "running.md", "benchmarks/results/a.md": "results/a.md", "README.md": "index.md"},
)


@pytest.mark.parametrize(
    ("origin", "place", "link", "expected"),
    [
        ("docs/start/index.md", "start/index.md", "../running.md#stop", "../running.md#stop"),
        ("README.md", "index.md", "docs/running.md", "running.md"),
        ("docs/start/x.md", "start/x.md", "../../benchmarks/results/a.md", "../results/a.md"),
        ("benchmarks/results/a.md", "results/a.md", "../../docs/running.md#b", "../running.md#b"),
        ("docs/launch.md", "launch.md", "../README.md", "index.md"),
        ("docs/launch.md", "launch.md", "../configs", "https://example.org/asyncrl/tree/main/configs"),
        ("docs/launch.md", "launch.md", "../train.py", "https://example.org/asyncrl/blob/main/train.py"),
        ("docs/launch.md", "launch.md", "missing.md", "missing.md"),
        ("docs/launch.md", "launch.md", "#many-machines", "#many-machines"),
        ("docs/launch.md", "launch.md", "https://example.com/a", "https://example.com/a"),
    ],
)
def test_links_lead_to_the_site_or_to_the_repository(origin: str, place: str, link: str, expected: str) -> None:
    assert rewritten(f"See [this]({link}).", origin, place, PLACES) == f"See [this]({expected})."


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/someone/asyncrl.git", "https://github.com/someone/asyncrl"),
        ("https://name:secret@example.org/group/asyncrl", "https://example.org/group/asyncrl"),
        ("git@github.com:someone/asyncrl.git", "https://github.com/someone/asyncrl"),
        ("ssh://git@example.org:2222/group/sub/asyncrl.git", "https://example.org/group/sub/asyncrl"),
        ("/home/someone/asyncrl", None),
        ("file:///home/someone/asyncrl", None),
        ("", None),
    ],
)
def test_links_to_the_repository_lead_to_where_it_was_cloned_from(remote: str, address: str | None) -> None:
    assert website_of(remote) == address


def test_code_keeps_its_links_and_tables_show_plain_pipes() -> None:
    text = "| `a\\|b` | [x](../train.py) |\n\n```md\n[x](../train.py) `a\\|b`\n```\n"
    changed = rewritten(text, "docs/launch.md", "launch.md", PLACES)
    assert changed.startswith("| `a|b` | [x](https://example.org/")
    assert changed.endswith("```md\n[x](../train.py) `a\\|b`\n```\n")


def test_anchors_are_those_of_github() -> None:
    assert anchor_of("Estimators: `--advantage-estimator`") == "estimators---advantage-estimator"


@pytest.mark.parametrize(
    ("html", "outside"),
    [
        ('<script src="https://unpkg.com/x.js"></script>', 1),
        ('<link rel="stylesheet" href="//fonts.example.org/a.css">', 1),
        ('<link rel="canonical" href="https://example.org/">', 0),
        ('<p style="background: url(http://example.org/a.png)">', 1),
        ('<a href="https://example.org">x</a><img src="a.svg">', 0),
        ('<pre class="mermaid">x</pre>', 1),
    ],
)
def test_what_a_browser_fetches_is_found(html: str, outside: int) -> None:
    assert len(read(html).urls) == outside
