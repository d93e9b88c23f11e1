"""The tab *Configuration*: the resolved settings of a run, and their difference to another run."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from asyncrl.page.runs.run_files import VERSIONS_FILE, RunFiles
from asyncrl.page.tabs.tab import PageRequest, Views

MISSING = "(not set)"


def show(request: PageRequest) -> Mapping[str, Any]:
    """Return the values of the template."""
    columns = [(run.name, flat(run.settings()) | flat(_versions(run), "version of ")) for run in request.runs]
    columns += [(path.name, flat(_read(path))) for path in _earlier(request)]
    only_changes = len(columns) > 1 and request.query.get("all") != "1"
    names = sorted({name for _, settings in columns for name in settings})
    rows = [(name, [settings.get(name, MISSING) for _, settings in columns]) for name in names]
    return {
        "columns": [name for name, _ in columns],
        "settings": [
            (name, values, len(set(values)) > 1) for name, values in rows if not only_changes or len(set(values)) > 1
        ],
        "only_changes": only_changes,
        "can_compare": len(columns) > 1,
        "files": [(path.name, _text(path)) for path in request.run.settings_files()[:1]],
        "earlier": [path.name for path in request.run.settings_files()[1:]],
        "chosen": request.query.get("earlier", ""),
    }


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Return nested settings as one text per name, such as ``a.b``."""
    return dict(_flat(settings, before))


def _flat(settings: Mapping[str, Any], before: str) -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


def _earlier(request: PageRequest) -> Sequence[Path]:
    """Return the file of an earlier run in this folder that the user chose."""
    return [path for path in request.run.settings_files()[1:] if path.name == request.query.get("earlier")]


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        return f"not readable: {error}"


def _versions(run: RunFiles) -> dict[str, Any]:
    try:
        found = orjson.loads((run.path / VERSIONS_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


VIEWS = Views(show=show)
