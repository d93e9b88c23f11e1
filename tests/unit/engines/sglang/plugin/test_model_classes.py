"""Classes of models that are imported when they are looked up, from a package in the place of SGLang's models."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.engines.sglang.plugin import model_classes
from asyncrl.engines.sglang.plugin.model_classes import ModelClasses, modules_by_class

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


def lazy(package: str) -> ModelClasses:
    modules = modules_by_class(package)
    assert modules is not None
    return ModelClasses(modules, {})


def test_every_entry_of_every_file_is_found_without_an_import(package: str) -> None:
    names = {"One": "one", "Two": "several", "Three": "several", "Five": "typed", "Six": "broken"}
    assert modules_by_class(package) == {name: f"{package}.{module}" for name, module in names.items()}
    assert not [name for name in sys.modules if name.startswith(f"{package}.")]


def test_a_class_is_imported_when_it_is_looked_up(package: str) -> None:
    classes = lazy(package)
    assert str(classes) == "['Five', 'One', 'Six', 'Three', 'Two']"
    assert "Two" in classes.keys()  # noqa: SIM118 (as SGLang asks)
    assert classes["Two"].__module__ == f"{package}.several"
    assert [name for name in sys.modules if name.startswith(f"{package}.")] == [f"{package}.several"]
    assert "Four" not in classes
    with pytest.raises(KeyError):
        classes["Four"]


def test_a_file_that_cannot_be_imported_costs_its_class_and_a_warning(
    package: str, caplog: pytest.LogCaptureFixture
) -> None:
    classes = lazy(package)
    with caplog.at_level(logging.WARNING):
        assert "Six" not in classes
    assert caplog.messages == [f"Ignore import error when loading {package}.broken: No module named 'no_such_library'"]
    assert {name: found.__name__ for name, found in classes.items()} == {
        name: name for name in ("One", "Two", "Three", "Five")
    }
    assert len(classes) == 4


def test_a_class_that_is_registered_replaces_the_one_of_a_file(package: str) -> None:
    one, two = type("One", (), {}), type("Two", (), {})
    classes = ModelClasses(modules_by_class(package) or {}, {"One": one})
    classes.update({"Two": two})
    assert (classes["One"], classes["Two"]) == (one, two)
    assert sorted(classes) == ["Five", "One", "Three", "Two"]


@pytest.mark.parametrize("source", ["EntryClass = make()\n", "if True:\n    EntryClass = A\n", "EntryClass = a.B\n"])
def test_a_file_that_names_its_classes_otherwise_leaves_all_to_sglang(
    package: str, source: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = model_classes._files(package)[0].parent  # noqa: SLF001
    (folder / "other.py").write_text(source)
    assert modules_by_class(package) is None
    monkeypatch.setattr(model_classes, "_PACKAGE", package)
    monkeypatch.setattr(model_classes, "unlike", None)  # would fail if it were called
    model_classes.activate()
    assert caplog.messages == [
        "asyncrl: a scheduler imports the classes of all models, which takes seconds: "
        "a file of a model names its class in an unknown form"
    ]


@pytest.mark.parametrize("name", ["SGLANG_DISABLED_MODEL_ARCHS", "SGLANG_EXTERNAL_MODEL_PACKAGE"])
def test_what_the_user_disables_or_adds_is_left_to_sglang(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setenv(name, "llama")
    monkeypatch.setattr(model_classes, "modules_by_class", asked.append)
    model_classes.activate()
    assert asked == []
