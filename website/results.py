"""The lists of measurements and of design decisions, made from the files in their folders."""

import re
from pathlib import Path

_DATE = re.compile(r"(\d{4}-\d{2}-\d{2})")


def result_files(root: Path) -> list[Path]:
    """Return the pages of measurements and their pictures."""
    folder = root / "benchmarks" / "results"
    return sorted([*folder.glob("*.md"), *folder.glob("*.svg")])


def results_page(root: Path) -> str:
    """Return the list of measurements, the newest first, with the beginning of each."""
    pages = [path for path in result_files(root) if path.suffix == ".md"]
    pages.sort(key=lambda path: (_date(path), path.name), reverse=True)
    return "\n".join((_RESULTS, *(f"| {_date(page)} | [{_title(page)}]({page.name}) |" for page in pages), ""))


_RESULTS = """# All measurements

This page is for people who want figures, or who want to repeat a measurement. Each page has the commands, the hardware,
the commit and the versions. [Benchmarks](benchmarks.md) describes the programs, which you can run on your machine.
Pages with later dates replace earlier ones on the same subject.

| date | measurement |
|---|---|"""


def design_page(root: Path) -> str:
    """Return the list of design decisions."""
    pages = sorted((root / "docs" / "design").glob("0*.md"))
    return "\n".join((_DESIGN, *(f"- [{_heading(page)}]({page.name})" for page in pages), ""))


_DESIGN = """# Decisions

This page is for people who ask why asyncrl is as it is. Each page has one decision, its reason and its price.
"""


def _heading(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _title(page: Path) -> str:
    """Return the heading of a page without its date."""
    return _heading(page).removesuffix(f", {_date(page)}")


def _date(page: Path) -> str:
    found = _DATE.search(page.name)
    if found is None:
        raise ValueError(f"{page}: the name of a page of results has its date")
    return found[1]
