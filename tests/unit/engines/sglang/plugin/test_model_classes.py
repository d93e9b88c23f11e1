"""Classes of models that are imported when they are looked up, from a package in the place of SGLang's models."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.engines.sglang.plugin import model_classes
from asyncrl.engines.sglang.plugin.model_classes import ModelClasses, entries

SOURCES = {
    "one.py": "class One: ...\nEntryClass = One\n",
    "several.py": "class Two: ...\nclass Three: ...\nEntryClass = [\n    Two,  # not Four]\n    Three,\n]\n",
    "typed.py": "class Five: ...\nEntryClass: list[type] = [Five]\n",
    "broken.py": "import no_such_library\nclass Six: ...\nEntryClass = (Six,)\n",
    "utils.py": "def helper(): ...\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "models_of_a_test"
    folder.mkdir()
    for name, source in SOURCES.items():
        (folder / name).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder.name
    for name in [each for each in sys.modules if each.startswith(folder.name)]:
        del sys.modules[name]


def test_every_entry_of_every_file_is_found_without_an_import(package: str) -> None:
    names = {"One": "one", "Two": "several", "Three": "several", "Five": "typed", "Six": "broken"}
    assert entries(package) == {name: f"{package}.{module}" for name, module in names.items()}
    assert not [name for name in sys.modules if name.startswith(f"{package}.")]


def test_a_class_is_imported_when_it_is_looked_up(package: str) -> None:
    classes = ModelClasses(entries(package), {})
    assert set(classes) == {"One", "Two", "Three", "Five", "Six"}
    assert len(classes) == 5
    assert "Two" in classes.keys()  # noqa: SIM118 (as SGLang asks)
    assert classes["Two"].__module__ == f"{package}.several"
    assert [name for name in sys.modules if name.startswith(f"{package}.")] == [f"{package}.several"]
    assert "Four" not in classes
    with pytest.raises(KeyError):
        classes["Four"]


def test_a_file_that_cannot_be_imported_costs_its_class_and_a_warning(
    package: str, caplog: pytest.LogCaptureFixture
) -> None:
    classes = ModelClasses(entries(package), {})
    with caplog.at_level(logging.WARNING):
        assert "Six" not in classes
    assert caplog.messages == [f"Ignore import error when loading {package}.broken: No module named 'no_such_library'"]
    assert set(classes) == {"One", "Two", "Three", "Five"}


def test_a_class_that_was_imported_before_replaces_the_one_of_a_file(package: str) -> None:
    other = type("One", (), {})
    classes = ModelClasses(entries(package), {"One": other})
    assert classes["One"] is other
    assert sorted(classes) == ["Five", "One", "Six", "Three", "Two"]


@pytest.mark.parametrize("name", ["SGLANG_DISABLED_MODEL_ARCHS", "SGLANG_EXTERNAL_MODEL_PACKAGE"])
def test_what_the_user_disables_or_adds_is_left_to_sglang(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "llama")
    monkeypatch.setattr(model_classes, "unlike", None)  # would fail if it were called
    model_classes.activate()
    assert "sglang.srt.models.registry" not in sys.modules
