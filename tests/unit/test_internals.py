"""Names inside other packages are checked before anything relies on them."""

import subprocess
import sys
import types
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from asyncrl.errors import InternalsChanged
from asyncrl.internals import Internal, check_internals, naming_imports, unlike

WRITER = "ray.fake_writer"
"""A module within an installed package, so that errors can name the package's version."""


class Writer:
    """A class as a library may have it."""

    def __init__(self) -> None:
        self.transforms = ()

    def write(self, path: str, bucket: object, use_fsync: bool = False) -> None:
        """Do nothing."""

    @classmethod
    def sorted(cls, names: list[str]) -> bool:
        """Contain a string that looks like an attribute."""
        return "torch.cuda.FloatTensor" in names

    @property
    def place(self) -> Any:
        """Contain a keyword that looks like an attribute."""
        return self.write(path="", bucket=None)


@pytest.fixture
def fake() -> Iterator[ModuleType]:
    module = types.ModuleType(WRITER)
    vars(module).update(Writer=Writer, settings={"known": 1}, __path__=[])
    sys.modules["ray"] = before = sys.modules.get("ray", types.ModuleType("ray"))
    sys.modules[WRITER] = module
    yield module
    del sys.modules[WRITER]
    if isinstance(before, ModuleType) and before.__spec__ is None:
        del sys.modules["ray"]


def internal(name: str = "Writer", **expected: Any) -> Internal:
    return Internal(name=f"{WRITER}.{name}", used_in="asyncrl.somewhere", **expected)


@pytest.mark.parametrize(
    "expected",
    [
        internal(),
        internal("Writer.write", parameters=("self", "path", "bucket")),
        internal("Writer.write", parameters=("self", "path", "bucket", "use_fsync"), is_exact=True),
        internal("Writer.write", parameters=("self",), keywords=("bucket", "path")),
        internal(attributes=("write", "transforms", "torch.cuda.FloatTensor", "bucket")),
        internal("settings", attributes=("known",)),
    ],
)
@pytest.mark.usefixtures("fake")
def test_a_name_that_is_as_expected_passes(expected: Internal) -> None:
    assert unlike([expected]) is None


@pytest.mark.parametrize(
    ("expected", "told"),
    [
        (internal("Reader"), f"{WRITER}.Reader is missing: "),
        (
            internal("Writer.write", parameters=("self", "bucket", "path")),
            f"{WRITER}.Writer.write takes (self, path, bucket, use_fsync), not (self, bucket, path) (used in asy",
        ),
        (
            internal("Writer.write", parameters=("self", "path", "bucket"), is_exact=True),
            "takes (self, path, bucket, u",
        ),
        (internal("Writer.write", parameters=("self", "path")), "Writer.write asks for bucket ("),
        (internal("Writer.write", parameters=("self",), keywords=("bucket", "folder")), "takes no folder ("),
        (internal("settings", keywords=("path",)), "settings has no signature"),
        (internal(attributes=("transforms", "results", "queue")), "Writer knows no results, queue ("),
    ],
)
@pytest.mark.usefixtures("fake")
def test_a_difference_is_named_in_one_line(expected: Internal, told: str) -> None:
    with pytest.raises(InternalsChanged) as raised:
        check_internals([internal()], [expected])
    line = str(raised.value)
    assert told in line
    assert "\n" not in line
    assert line.endswith("ray 2.60.0 is installed, 2.60.0 was read (docs/internals.md)")


@pytest.mark.usefixtures("fake")
def test_of_many_differences_the_first_three_are_shown() -> None:
    line = unlike(internal(f"Missing{number}") for number in range(5))
    assert line is not None
    assert line.count("is missing") == 3
    assert "; and 2 more: ray " in line


def test_a_stand_in_that_takes_anything_passes(fake: ModuleType) -> None:
    vars(fake)["stand_in"] = lambda *args, **kwargs: None
    assert unlike([internal("stand_in", parameters=("device",), is_exact=True)]) is None


def test_an_import_that_fails_is_named_with_the_versions() -> None:
    line = r"cannot import name 'x'.*megatron-core \S+ is installed, 0.19.2 was read"
    with pytest.raises(InternalsChanged, match=line), naming_imports():
        raise ImportError("cannot import name 'x' from 'megatron.core'", name="megatron.core")


def test_an_import_of_anything_else_fails_as_before() -> None:
    with pytest.raises(ImportError, match="no yaml"), naming_imports():
        raise ImportError("no yaml", name="yaml")


def test_the_driver_checks_ray_without_importing_torch() -> None:
    code = (
        "import sys, ray, asyncrl.engines.cluster.session as session;"
        "from asyncrl.internals import check_internals;"
        "check_internals(session.INTERNALS, session.CALLS, session.PLACEMENT);"
        "print(*{'torch', 'megatron', 'sglang'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True, timeout=50
    )
    assert done.stdout.split() == []
