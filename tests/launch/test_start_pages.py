"""The figures on the pages in docs/start are those of each script's dry run."""

import json
import re
from pathlib import Path

import pytest

from tests.launch.test_scripts import MODELS, ROOT, SCRIPTS, launched

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
RELEASED_IN_FP8 = ("deepseek-r1",)


def words(line: str) -> str:
    return " ".join(line.split())


def model(script: str, folder: Path) -> str:
    """Return a folder with the released model's config.json."""
    if script not in RELEASED_IN_FP8:
        return str(MODELS / script)
    config = json.loads((MODELS / script / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    return str(folder)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_page_has_the_figures_of_the_dry_run(script: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "start" / f"{script}.md").read_text()
    (table,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    done = launched(script, "--dry-run", MODEL=model(script, tmp_path), RUNS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    shown = {words(line) for line in done.stdout.splitlines()}
    assert [line for line in map(words, table.splitlines()) if line and line not in shown] == []
    (millions,) = re.findall(r"([\d,.]+) million parameters", table)
    billions = float(millions.replace(",", "")) / 1000
    assert f" bytes for each of {billions:.1f} billion" in page or f" byte for each of {billions:.1f} billion" in page
    size = re.search(r"^\| each checkpoint \| about ([\d.]+) (GB|TB) \| 14 bytes ", page, re.MULTILINE)
    assert size is not None
    assert float(size[1]) * (1000 if size[2] == "TB" else 1) == pytest.approx(14 * billions, rel=0.02)


def test_smaller_gpus_fit_as_the_pages_tell() -> None:
    for script in SCRIPTS:
        page = (ROOT / "docs" / "start" / f"{script}.md").read_text()
        for flags in re.findall(rf"^bash configs/{re.escape(script)}\.sh (--dry-run .+)$", page, re.MULTILINE):
            done = launched(script, *flags.split())
            assert "the dry run found nothing wrong" in done.stdout.splitlines()[-1], done.stderr
