"""The pictures of the page in docs/guides/page.md, from a real run.

    uv run python -m website.pictures RUN_DIR

Needs Chromium.  The run should have some twenty steps, and ``model/`` for the texts of tokens.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from benchmarks.page.program import page_of

FOLDER = Path(__file__).parents[1] / "docs" / "guides" / "pictures"
SIZE = {"width": 1280, "height": 760}
SETTLE_MS = 1_500
"""Time for figures to be drawn."""


def main(argv: Sequence[str]) -> int:
    """Write the pictures and return the exit code."""
    flags = argparse.ArgumentParser(description="Write the pictures of docs/guides/page.md.")
    flags.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    run_dir = flags.parse_args(argv).run_dir
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.stderr.write("error: Chromium is not installed (Debian's package chromium)\n")
        return 2
    FOLDER.mkdir(exist_ok=True)
    with page_of(run_dir) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": SIZE["width"], "height": SIZE["height"]})
        page.goto(url)
        for name in ("overview", "timeline", "staleness"):
            _visit(page, name)
            _keep(page, name)
        _visit(page, "samples")
        page.get_by_role("link", name="Spread").click()
        page.locator("tbody a").first.click()
        _keep(page, "group")
        page.get_by_role("link", name="token by token").first.click()
        page.get_by_role("link", name="log-prob").click()
        _keep(page, "sample")
        browser.close()
    return 0


def _visit(page: Page, tab: str) -> None:
    page.get_by_role("navigation").get_by_role("link", name=tab.title()).click()
    page.wait_for_timeout(SETTLE_MS)
    page.reload()  # an index is complete by now


def _keep(page: Page, name: str) -> None:
    page.wait_for_timeout(SETTLE_MS)
    page.screenshot(path=FOLDER / f"page_{name}.png")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
