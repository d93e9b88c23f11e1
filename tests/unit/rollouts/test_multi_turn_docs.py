"""The example in docs/guides/multi_turn.md runs, and its test passes."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs/guides/multi_turn.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))


def test_the_example_and_its_test_run_as_printed(tmp_path: Path) -> None:
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    call = "from test_my_calculator import *; test_the_result_of_a_call_is_observed()"
    assert sorted(FILES) == ["my_calculator.py", "test_my_calculator.py"]
    subprocess.run([sys.executable, "-c", call], cwd=tmp_path, check=True, env=_with_package(), timeout=180)


def _with_package() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
