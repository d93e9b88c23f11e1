"""Files of results: written, and joined."""

import lzma
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from asyncrl.errors import ConfigError
from benchmarks.sync_vs_async.figures import ArrangementRun, Results, Setup
from benchmarks.sync_vs_async.report import markdown, picture


def write(out: Path, results: Results, about: Mapping[str, Any]) -> None:
    """Write ``results.json``, ``table.md`` and ``picture.svg`` to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    found = {"about": about, **asdict(results), "ideal": asdict(results.ideal) if results.by_arrangement else None}
    (out / "results.json").write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    (out / "table.md").write_text(markdown(results, about))
    (out / "picture.svg").write_text(picture(results))


def read(files: Sequence[Path]) -> tuple[Results, dict[str, Any]]:
    """Join the runs of several ``results.json``.  Raises ConfigError unless setup and hardware are the same."""
    found = [_read(file) for file in files]
    first = found[0]
    for file, each in zip(files, found, strict=True):
        if Setup(**each["setup"]) != Setup(**first["setup"]) or each["about"]["hardware"] != first["about"]["hardware"]:
            raise ConfigError(f"{file}: setup or hardware differs from {files[0]}; join only results of the same")
    about = dict(first["about"]) | {
        name: "; ".join(dict.fromkeys(str(each["about"][name]) for each in found))
        for name in ("date", "command", "commit")
    }
    results = Results(
        setup=Setup(**first["setup"]),
        runs=tuple(ArrangementRun.of(run) for each in found for run in each["runs"]),
        full_rates=tuple(rate for each in found for rate in each["full_rates"]),
    )
    return results, about


def _read(file: Path) -> dict[str, Any]:
    try:
        content = file.read_bytes()
        found: dict[str, Any] = orjson.loads(lzma.decompress(content) if file.suffix == ".xz" else content)
    except (OSError, lzma.LZMAError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    return found
