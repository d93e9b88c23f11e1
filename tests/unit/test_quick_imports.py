import gc
import importlib.metadata
import sys

import pytest
import torch

from asyncrl.quick_imports import cpu_imports, packages_distributions, quick_imports


def test_a_hidden_library_cannot_be_imported_in_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with quick_imports("colorsys", "os"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("colorsys")
        assert importlib.import_module("os").getpid() > 0  # it was imported before
        assert not gc.isenabled()
    assert importlib.import_module("colorsys").rgb_to_hsv(1.0, 0.0, 0.0) == (0.0, 1.0, 1.0)
    assert gc.isenabled()


def test_a_failed_import_leaves_nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"), quick_imports("colorsys"):
        importlib.import_module("no_such_library")
    assert "colorsys" not in sys.modules
    assert gc.isenabled()


def test_nothing_is_compiled_that_is_imported_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(ModuleNotFoundError), cpu_imports("colorsys"):
        for decorated in (torch.compile(abs), torch.compile(dynamic=True)(abs)):
            assert decorated is abs
        importlib.import_module("colorsys")
    assert torch.compile is compiled


def test_packages_have_the_distributions_that_the_standard_library_finds() -> None:
    expected = importlib.metadata.packages_distributions()
    found = packages_distributions()  # may have more, of listed files that are not there
    assert {name: sorted(found.get(name, [])) for name in expected} == {
        name: sorted(each) for name, each in expected.items()
    }
