"""Links of pages, as they are on GitHub, rewritten for the site.

A link of a page is relative to the page's file in the repository.  In the site, files that are pages of the site have
other places, and all other files of the repository are only at its address.
"""

import posixpath
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = "https://github.com/OWNER/asyncrl"
"""Stands for the repository's address in pages."""
_FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2`*[ ]*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
_OUTSIDE = re.compile(r"[a-z]+:|#")
_REMOTE = re.compile(
    r"(?:https?://(?:[^/@]+@)?|(?:ssh://)?git@)(?P<host>[\w.-]+)(?::\d+/|[:/])(?P<path>[^:]+?)(?:\.git)?/?"
)


@dataclass(frozen=True, slots=True)
class Places:
    """The places of files: in the repository and in the site."""

    root: Path
    """The folder of the repository."""
    address: str
    """The address at which the repository's files can be read, without a slash at its end."""
    in_site: Mapping[str, str]
    """The places in the site by paths in the repository; folders may have a page as well."""


def remote_website(root: Path) -> str | None:
    """Return the website of the remote that the clone came from; None without git, or if it is a folder."""
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        return website_of(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    except (OSError, subprocess.CalledProcessError):
        return None


def website_of(remote: str) -> str | None:
    """Return the website of a remote: ``git@HOST:OWNER/NAME.git`` is at ``https://HOST/OWNER/NAME``."""
    found = _REMOTE.fullmatch(remote)
    return None if found is None else f"https://{found['host']}/{found['path']}"


def rewritten(markdown: str, origin: str, place: str, places: Places) -> str:
    """Return the page ``origin`` of the repository with links that are right at ``place`` in the site.

    A link that leads nowhere stays as it is, so that mkdocs reports it.
    """
    base = posixpath.dirname(origin)

    def target(match: re.Match[str]) -> str:
        return f"]({_target(match[1], base, place, places)})"

    return _outside_fences(markdown, lambda text: _LINK.sub(target, _plain_pipes(text)))


def _target(link: str, base: str, place: str, places: Places) -> str:
    if _OUTSIDE.match(link):
        return link
    path, hash_, anchor = link.partition("#")
    named = posixpath.normpath(posixpath.join(base, path))
    if named in places.in_site:
        return posixpath.relpath(places.in_site[named], posixpath.dirname(place) or ".") + hash_ + anchor
    if not (places.root / named).exists():
        return link
    kind = "tree" if (places.root / named).is_dir() else "blob"
    return f"{places.address}/{kind}/main/{named}{hash_}{anchor}"


def _plain_pipes(text: str) -> str:
    r"""Return ``text`` with ``|`` for ``\|`` in the code of tables: GitHub needs the backslash, Markdown shows it."""
    lines = text.split("\n")
    return "\n".join(_CODE.sub(_plain, line) if line.startswith("|") else line for line in lines)


def _plain(code: re.Match[str]) -> str:
    return code[0].replace(r"\|", "|")


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    return "".join(change(text) if is_text else text for is_text, text in _parts(markdown))


def _parts(markdown: str) -> Iterator[tuple[bool, str]]:
    """Yield the parts of a page, and whether each is text and no block of code."""
    start = 0
    for fence in _FENCE.finditer(markdown):
        yield True, markdown[start : fence.start()]
        yield False, fence[0]
        start = fence.end()
    yield True, markdown[start:]


def anchor_of(heading: str, separator: str = "-") -> str:
    """Return the anchor that GitHub gives to a heading, so that links work in both places."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)
