"""Plug-ins of SGLang that a benchmark brings along, found through PYTHONPATH instead of an installation."""

import os
from pathlib import Path

from benchmarks.common.circumstances import ROOT


def environment(folder: Path, name: str, module: str, *more: Path) -> dict[str, str]:
    """Describe the plug-in ``module:activate`` in ``folder``, and return the variables with which SGLang finds it.

    ``more`` are further folders for PYTHONPATH.
    """
    described = folder / f"{name}-0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0\n")
    (described / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {module}:activate\n")
    paths = (folder, *more, ROOT, os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": ":".join(filter(None, map(str, paths)))}
