"""The notebook in short form, in a real Jupyter kernel: two real runs on a CPU, of which one is left early."""

import uuid
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

from tests.integration.launcher import LEAVING_S, MARK, ROOT, RUN_S, members_of

NOTEBOOK = ROOT / "examples" / "notebooks" / "quickstart.ipynb"
STEPS = 3
SHORT_FORM = {"STEPS = 20": f"STEPS = {STEPS}", '"reward/mean"] > 0.8': '"reward/mean"] >= 0.0'}
"""Lines of the notebook, and those in their place: fewer steps, and an end of the second run after the first one."""

pytestmark = pytest.mark.timeout(2700)


def executed(folder: Path) -> Any:
    """Execute the notebook in its short form, with all files that it writes in ``folder``."""
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    for old, new in SHORT_FORM.items():
        [cell] = [cell for cell in notebook.cells if old in cell.source]
        cell.source = cell.source.replace(old, new)
    for name in ("train_async.py", "configs"):
        (folder / name).symlink_to(ROOT / name)
    # Sockets in a folder: another process may take a TCP port before the kernel listens on it.
    config = Config(KernelManager={"transport": "ipc", "ip": str(folder / "socket")})
    client = NotebookClient(notebook, timeout=int(RUN_S), resources={"metadata": {"path": str(folder)}}, config=config)
    return client.execute()


def printed(notebook: Any) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


def test_the_notebook_trains_draws_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    notebook = executed(tmp_path)
    left = psutil.wait_procs(members_of(mark), timeout=LEAVING_S)[1]
    assert left == []
    kinds = [kind for cell in notebook.cells for output in cell.get("outputs", ()) for kind in output.get("data", ())]
    assert kinds.count("image/png") == 2
    assert kinds.count("text/html") == 2  # the samples as a table
    assert "step 0: reward 0." in printed(notebook)
    assert "left after 1 steps" in printed(notebook)
    first, second = sorted(tmp_path.glob("runs/quickstart-*"), key=lambda folder: folder.stat().st_ctime)
    assert len((first / "metrics.jsonl").read_bytes().splitlines()) == STEPS
    assert len((second / "metrics.jsonl").read_bytes().splitlines()) < 20
    assert set(pq.read_table(second / "rollouts" / "step-000000.parquet")["reward"].to_pylist()) <= {0.0, 0.5, 1.0}


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    assert [cell.id for cell in notebook.cells if cell.get("outputs")] == []
