"""Names inside other packages that asyncrl relies on, although they may change without notice.

Each module that relies on such names lists them in ``INTERNALS``, and the code that starts the module calls
``check_internals`` first.  ``docs/internals.md`` says for each name why it is needed and how a change shows.

Imports only the modules that the given names are in.
"""

import importlib.metadata
import inspect
import pkgutil
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from asyncrl.errors import InternalsChanged, first_line

READ_IN = {
    "megatron-core": "0.19.2",
    "python": "3.12",
    "ray": "2.60.0",
    "sglang": "0.5.16",
    "torch": "2.11.0",
    "torch-memory-saver": "0.0.10",
}
"""The version of each distribution whose source was read."""

_DISTRIBUTIONS = {
    "megatron": "megatron-core",
    "ray": "ray",
    "sglang": "sglang",
    "torch": "torch",
    "torch_memory_saver": "torch-memory-saver",
}
"""Distribution by the first part of a dotted name; every other name belongs to Python."""
_MOST_SHOWN = 3
"""Most differences listed in one error line; a new version may have dozens."""
_NEEDS_NO_DEFAULT = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Internal:
    """One name and its properties that asyncrl relies on."""

    name: str
    """Dotted name, beginning with the module."""
    used_in: str
    """The asyncrl module that relies on the name."""
    parameters: tuple[str, ...] = ()
    """The first parameters, in order; any further parameter must have a default.  Empty accepts any parameters."""
    is_exact: bool = False
    """Forbid further parameters, because a function of asyncrl is called in its place."""
    keywords: tuple[str, ...] = ()
    """Parameters that are passed by keyword."""
    attributes: tuple[str, ...] = ()
    """Attributes that must exist, or names and strings that the code must mention.

    The code is searched because instance attributes do not exist before an instance does.
    """

    @property
    def distribution(self) -> str:
        """The package to name in an error."""
        return _DISTRIBUTIONS.get(self.name.partition(".")[0], "python")


def check_internals(*tables: Iterable[Internal]) -> None:
    """Raise InternalsChanged, with one line, unless every name exists and looks as expected."""
    if (found := unlike(*tables)) is not None:
        raise InternalsChanged(found)


def unlike(*tables: Iterable[Internal]) -> str | None:
    """Describe all differences in one line with the installed and the read versions; return None if there are none."""
    expected = [internal for table in tables for internal in table]
    found = [(internal, told) for internal in expected if (told := _difference(internal)) is not None]
    if not found:
        return None
    shown = "; ".join(f"{told} (used in {internal.used_in})" for internal, told in found[:_MOST_SHOWN])
    more = f"; and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    versions = _versions(sorted({internal.distribution for internal, _ in found}))
    return f"{shown}{more}: {versions} (docs/internals.md)"


@contextmanager
def naming_imports() -> Iterator[None]:
    """Turn an ImportError of a known package into InternalsChanged, for names missing before they can be checked."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _DISTRIBUTIONS:
            raise
        versions = _versions([_DISTRIBUTIONS[package]])
        raise InternalsChanged(f"{first_line(error)}: {versions} (docs/internals.md)") from error


def _difference(internal: Internal) -> str | None:
    try:
        found = pkgutil.resolve_name(internal.name)
    except (AttributeError, ImportError) as error:
        return f"{internal.name} is missing: {first_line(error)}"
    except Exception as error:  # noqa: BLE001 -- importing another project's module may raise anything
        return f"{internal.name} cannot be imported: {type(error).__name__}: {first_line(error)}"
    told = _difference_of_parameters(internal, found) if internal.parameters or internal.keywords else None
    if told is not None:
        return f"{internal.name} {told}"
    missing = [name for name in internal.attributes if not _has(found, name)]
    return f"{internal.name} knows no {', '.join(missing)}" if missing else None


def _difference_of_parameters(internal: Internal, found: Any) -> str | None:
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return "has no signature"
    kinds = {parameter.kind for parameter in parameters.values()}
    if kinds.issuperset(_NEEDS_NO_DEFAULT):  # (*args, **kwargs), as a replacement of ours has
        return None
    names, first = tuple(parameters), len(internal.parameters)
    if names[:first] != internal.parameters or (internal.is_exact and len(names) > first):
        return f"takes ({', '.join(names)}), not ({', '.join(internal.parameters)})"
    if missing := [name for name in internal.keywords if name not in names]:
        return f"takes no {', '.join(missing)}"
    others = [parameters[name] for name in names[first:] if name not in internal.keywords]
    new = [each.name for each in others if each.default is each.empty and each.kind not in _NEEDS_NO_DEFAULT]
    return f"asks for {', '.join(new)}" if new else None


def _has(found: Any, name: str) -> bool:
    """Return whether ``found`` has ``name`` as an attribute, field or item, or mentions it in its code."""
    if hasattr(found, name) or (isinstance(found, dict) and name in found):
        return True
    if not isinstance(found, type):
        return _mentions(found, name)
    return any(
        name in vars(kind).get("__annotations__", {}) or any(_mentions(each, name) for each in vars(kind).values())
        for kind in found.__mro__
    )


def _mentions(function: Any, name: str) -> bool:
    function = function.fget if isinstance(function, property) else getattr(function, "__func__", function)
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return code is not None and _is_in(code, name)


def _is_in(code: CodeType, name: str) -> bool:
    """Search the names and constants of ``code`` and of the functions defined in it."""
    if name in code.co_names or name in code.co_varnames:
        return True
    return any(_is_constant(constant, name) for constant in code.co_consts)


def _is_constant(constant: object, name: str) -> bool:
    if isinstance(constant, CodeType):
        return _is_in(constant, name)
    if isinstance(constant, tuple | frozenset):  # the keywords of a call are a tuple of names
        return any(_is_constant(each, name) for each in constant)
    return constant == name


def _versions(distributions: Iterable[str]) -> str:
    return ", ".join(f"{each} {_installed(each)} is installed, {READ_IN[each]} was read" for each in distributions)


def _installed(distribution: str) -> str:
    if distribution == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"
