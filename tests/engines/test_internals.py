"""Every registered name is in the installed packages, looks as expected, and is explained in docs/internals.md."""

import json
import re
import subprocess
from typing import Any

import pytest

from asyncrl.internals import READ_IN
from tests.programs import ROOT, program

PAGE = (ROOT / "docs" / "internals.md").read_text()

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = program("tests.engines.internals_process")
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=1740)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_the_installed_packages_look_as_expected(found: dict[str, Any]) -> None:
    assert found["unlike"] is None


def test_the_classes_of_models_are_those_that_sglang_imports(found: dict[str, Any]) -> None:
    assert (found["kind"], found["disabled"]) == ("ModelClasses", None)
    assert found["lazy"] == found["classes"]
    assert len(found["lazy"]) > 200


def test_few_files_of_models_are_imported_for_one_model(found: dict[str, Any]) -> None:
    assert found["asked"] in found["imported"]
    assert len(found["imported"]) < 20


def test_every_registered_name_is_on_the_page(found: dict[str, Any]) -> None:
    assert [name for name in found["names"] if f"`{name}`" not in PAGE] == []


def test_every_module_that_relies_on_one_is_on_the_page(found: dict[str, Any]) -> None:
    files = [name.removeprefix("asyncrl.").replace(".", "/") for name in found["used_in"]]
    assert [file for file in files if f"`{file}.py`" not in PAGE] == []


def test_every_file_on_the_page_is_there() -> None:
    files = re.findall(r"`((?:[\w-]+/)*\w+\.py)`", PAGE)
    assert len(files) > 30
    assert [file for file in files if not (ROOT / "asyncrl" / file).exists() and not (ROOT / file).exists()] == []


def test_the_page_names_the_versions_that_were_read() -> None:
    assert [name for name, version in READ_IN.items() if f"{name} {version}" not in PAGE] == []


def test_no_sentence_is_longer_than_thirty_words() -> None:
    cells = re.split(r"\||\n\n|\n- |(?<=[.:;?])\s", re.sub(r"`[^`]*`", "name", PAGE))
    assert [cell for cell in cells if len(cell.split()) > 30] == []
