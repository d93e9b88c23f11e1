"""The sockets of a run, the table of docs/security.md that lists them, and the places that show a secret."""

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.programs import words_of

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|[^|]+\|[^|]+\|$")
"""The process, its socket, the address on one machine, and the address on several machines."""
OPTIONAL = "(some runs)"
"""The words behind a socket that not every run has."""
EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the page: a socket of one kind of process."""

    process: str
    is_always_there: bool
    one_machine: frozenset[str]
    several_machines: frozenset[str]


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    """A socket that waits for connections."""

    process: str
    """The name that the page has for the process, otherwise its command line."""
    address: str
    """The address, or ``all`` for every interface."""


def rows(text: str | None = None) -> tuple[Row, ...]:
    """The table of the page."""
    lines = (PAGE.read_text() if text is None else text).splitlines()
    return tuple(
        Row(
            process=found[1],
            is_always_there=OPTIONAL not in found[2],
            one_machine=_addresses(found[3]),
            several_machines=_addresses(found[4]),
        )
        for found in map(ROW.match, lines)
        if found
    )


def _addresses(cell: str) -> frozenset[str]:
    return frozenset(re.findall(r"`([^`]+)`", cell))


def listening(processes: Iterable[psutil.Process], table: Sequence[Row]) -> list[Listener]:
    """The TCP sockets on which these processes wait for connections, as ``ss -ltnp`` shows them."""
    names = {row.process for row in table}
    found = []
    for process in processes:
        words = words_of(process)
        with contextlib.suppress(psutil.Error):  # it has just ended
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.append(Listener(_name(words, names), _plain(each.laddr.ip)))
    return sorted(found)


def _name(words: Sequence[str], names: Collection[str]) -> str:
    """The first word of a command line that the page has, without its folder."""
    bare = (word.strip().rpartition("/")[2] for word in words)
    return next((word for word in bare if word in names), " ".join(words))


def _plain(address: str) -> str:
    plain = address.removeprefix("::ffff:")
    return "all" if plain in EVERYWHERE else plain


def unlisted(found: Iterable[Listener], table: Sequence[Row]) -> list[Listener]:
    """The sockets of a run on one machine that the page lacks, or has at another address."""
    return sorted(each for each in set(found) if not any(_is_of(each, row) for row in table))


def _is_of(listener: Listener, row: Row) -> bool:
    return listener.process == row.process and listener.address in row.one_machine


def not_found(found: Iterable[Listener], table: Sequence[Row]) -> list[str]:
    """The processes of the page that listen on fewer sockets than it has for every run."""
    expected = Counter(row.process for row in table if row.is_always_there)
    return sorted((expected - Counter(each.process for each in found)).keys())


def showing(secret: str, folders: Iterable[Path], processes: Iterable[psutil.Process]) -> list[str]:
    """The files, command lines and environments that have ``secret`` in them."""
    content = secret.encode()
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return [str(path) for path in files if content in path.read_bytes()] + [*_telling(secret, processes)]


def _telling(secret: str, processes: Iterable[psutil.Process]) -> Iterator[str]:
    for process in processes:
        if secret in " ".join(words_of(process)):
            yield f"the command line of {process}"
        with contextlib.suppress(psutil.Error):
            if any(secret in value for value in process.environ().values()):
                yield f"the environment of {process}"
