"""The hooks of mkdocs.yml: pages from outside docs/, generated pages, and links that leave docs/."""

import functools
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from website import reference
from website.api import api_page
from website.links import UNKNOWN, Places, anchor_of, remote_website, rewritten
from website.results import design_page, result_files, results_page

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "results/benchmarks.md",
}
"""Pages that are not in docs/, with their places in the site."""
FOLDERS = {"docs/design": "design/index.md", "benchmarks/results": "results/index.md", "docs": "index.md"}
"""Folders to which pages link, with the page that stands for each."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Find the repository's address, and give headings the anchors of GitHub, which the pages' links have."""
    config.extra["repository"] = config.extra["repository"] or remote_website(ROOT) or UNKNOWN
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor_of
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and the generated ones."""
    for origin, place in outside().items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / origin)))
    for place, text in generated_pages().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of pages that are files of the repository."""
    place = page.file.src_uri
    if place in generated_pages():
        return markdown
    origins = {there: origin for origin, there in outside().items()}
    in_site = {f"docs/{file.src_uri}": file.src_uri for file in files if file.generated_by is None}
    places = Places(ROOT, config.extra["repository"], in_site | outside() | FOLDERS)
    named = markdown.replace(UNKNOWN, places.address)  # in commands that readers copy
    return rewritten(named, origins.get(place, f"docs/{place}"), place, places)


@functools.cache
def outside() -> dict[str, str]:
    """Return the files from outside docs/ by their paths in the repository, with their places in the site."""
    results = {path.relative_to(ROOT).as_posix(): f"results/{path.name}" for path in result_files(ROOT)}
    return OUTSIDE | results


@functools.cache
def generated_pages() -> dict[str, str]:
    """Return the text of each page that is made from the code, by its place in the site."""
    return {
        "reference/flags.md": reference.flags_page(),
        "reference/metrics.md": reference.metrics_page(),
        "reference/files.md": reference.files_page(),
        "reference/commands.md": reference.commands_page(),
        "reference/api.md": api_page(),
        "design/index.md": design_page(ROOT),
        "results/index.md": results_page(ROOT),
    }
