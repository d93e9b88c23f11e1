"""A plug-in of stock SGLang: a scheduler imports the class of the model that it serves, not those of all models.

    sglang.srt.models: source files ─▶ class names ─▶ ModelClasses, in place of ModelRegistry's dict
                                                          └─▶ import of a file once SGLang looks up its class

SGLang imports every file in ``sglang.srt.models``, with all libraries that these use, when a scheduler looks up its
model.  In a short run of the quickstart that was a third of the scheduler's CPU time (AMD EPYC: 3.8 of 11.6 s).
"""

import logging
import os
import re
import sys
from collections import UserDict
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.internals import Internal, unlike

_PACKAGE = "sglang.srt.models"
_DISABLED, _EXTERNAL = "SGLANG_DISABLED_MODEL_ARCHS", "SGLANG_EXTERNAL_MODEL_PACKAGE"

INTERNALS = (
    Internal(
        name="sglang.srt.models.registry.ModelRegistry",
        attributes=("models", "resolve_model_cls", "get_supported_archs"),
        used_in=__name__,
    ),
    Internal(
        name="sglang.srt.models.registry.import_model_classes",
        parameters=("package_name",),
        attributes=("EntryClass", _DISABLED, "cache_clear"),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""

_ENTRY = re.compile(r"^EntryClass\s*(?::[^=\n]*)?=\s*(\[.*?\]|\(.*?\)|\w+)\s*$", re.MULTILINE | re.DOTALL)
"""The line by which a file names its classes, one or a list."""
_ANY_ENTRY = re.compile(r"^\s*EntryClass\b", re.MULTILINE)
"""The beginning of any line that names classes."""
_COMMENT = re.compile(r"#.*")
_SLOWER = "asyncrl: a scheduler imports the classes of all models, which takes seconds"

logger = logging.getLogger(__name__)


class ModelClasses(UserDict[str, Any]):
    """Classes of models by name, each imported when it is looked up.

    A class whose file cannot be imported is missing, with a warning, as in SGLang.
    """

    def __init__(self, modules: Mapping[str, str], imported: Mapping[str, Any]) -> None:
        """``modules`` has the module of each class; ``imported`` are classes that replace those of the same name."""
        self._modules = dict(modules)
        super().__init__(imported)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str):
            self._import(name)
        return name in self.data

    def __getitem__(self, name: str) -> Any:
        self._import(name)
        return self.data[name]

    def __setitem__(self, name: str, found: Any) -> None:
        self._modules.pop(name, None)
        self.data[name] = found

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all classes, which imports them, because a file that fails has none."""
        for name in list(self._modules):
            self._import(name)
        return iter(self.data)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        """Return the names alone, without an import: SGLang writes them into an error line."""
        return str(sorted({*self.data, *self._modules}))

    def _import(self, name: str) -> None:
        # Invariant: one thread looks up classes.  During the import, another one would find the class missing.
        if (module := self._modules.pop(name, None)) is None:
            return
        try:
            entry = import_module(module).EntryClass
        except Exception as error:  # noqa: BLE001 (as SGLang does, so that a missing library costs one model)
            logger.warning("Ignore import error when loading %s: %s", module, error)
            return
        classes = entry if isinstance(entry, list | tuple) else [entry]
        self.data.update({each.__name__: each for each in classes if each.__name__ == name})


def activate() -> None:
    """Replace SGLang's dict of classes.  SGLang calls this in the server and in each scheduler that it spawns.

    Without effect where the user disables files or adds a package, and, but for a warning, in an unknown SGLang.
    """
    if any(os.environ.get(name) for name in (_DISABLED, _EXTERNAL)):
        return
    modules = modules_by_class(_PACKAGE)
    if modules is None:
        logger.warning("%s: a file of a model names its class in an unknown form", _SLOWER)
    if not modules:
        return
    os.environ[_DISABLED] = ",".join(file.stem for file in _files(_PACKAGE))
    try:
        difference = unlike(INTERNALS)  # imports the registry, which imports all files but the disabled ones
    finally:
        del os.environ[_DISABLED]
    if difference is not None:
        logger.warning("%s: %s", _SLOWER, difference)
        sys.modules.pop(f"{_PACKAGE}.registry", None)
        return
    registry = import_module(f"{_PACKAGE}.registry")
    registry.import_model_classes.cache_clear()
    registry.ModelRegistry.models = ModelClasses(modules, registry.ModelRegistry.models)


def modules_by_class(package: str) -> dict[str, str] | None:
    """Return the module of each class that a source file of ``package`` names as its entry.  Imports no file.

    Returns None if a file names its classes in a form that is not understood.
    """
    found: dict[str, str] = {}
    for path in _files(package):
        text = _COMMENT.sub("", path.read_text(encoding="utf-8"))
        named = _ENTRY.findall(text)
        if len(named) != len(_ANY_ENTRY.findall(text)):
            return None
        found |= {name: f"{package}.{path.stem}" for entry in named for name in re.findall(r"\w+", entry)}
    return found


def _files(package: str) -> list[Path]:
    found = find_spec(package)
    folders = (found and found.submodule_search_locations) or ()
    return [path for folder in folders for path in sorted(Path(folder).glob("*.py"))]
