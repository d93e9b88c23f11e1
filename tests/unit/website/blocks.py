"""The fenced blocks of the documentation's pages."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w/]+\.(?:py|toml|yaml))\b")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    """The page's path in the repository."""
    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that the block's first line gives it."""
        found = _FILE.match(self.text)
        return found[1] if found else None

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]


def blocks_of(text: str, page: str) -> list[Block]:
    """Return all fenced blocks of a page, in their order."""
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match[2].strip(), match[3])
        for match in _FENCE.finditer(text)
    ]


def all_blocks() -> list[Block]:
    """Return the blocks of the README and of all pages in docs/."""
    return [block for page in PAGES for block in blocks_of(page.read_text(), str(page.relative_to(ROOT)))]


def user_files(blocks: list[Block]) -> dict[str, str]:
    """Return the files that blocks print, by name: ``# my_reward.py`` in the first line names one."""
    return {name: block.text for block in blocks if (name := block.file)}
