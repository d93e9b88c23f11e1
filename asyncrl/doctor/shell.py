"""The state of a launch script while it is read: variables, arrays and assumptions."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.doctor.words import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A remark about one line of a script."""

    place: str
    """File and line."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of the script, after expansion.  It is not run."""

    words: tuple[Text, ...]
    environment: Mapping[str, Text]
    """Variables that are set for this command alone."""
    place: str


@dataclass(slots=True, kw_only=True)
class Shell:
    """Everything that is known after some statements of a script."""

    script: Path
    """The main script, as an absolute path."""
    scalars: dict[str, Text]
    arrays: dict[str, list[Text]] = field(default_factory=dict)
    exported: dict[str, Text] = field(default_factory=dict)
    functions: dict[str, Any] = field(default_factory=dict)
    """Syntax trees of function bodies by name."""
    commands: list[Command] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    mistakes: list[Note] = field(default_factory=list)
    """Places where the script loses words, such as a missing backslash."""
    used_arrays: set[str] = field(default_factory=set)
    unset_arrays: dict[str, Note] = field(default_factory=dict)
    """Arrays that the script uses and does not set, each with a note on its first use."""
    missing_files: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    """The files that are being read; the last one includes the current statement."""
    arguments: tuple[Text, ...] = ()
    """Positional arguments of the function that is being read."""

    num_statements: int = 0
    """The number of statements that were read so far."""

    @property
    def file(self) -> Path:
        """The file of the current statement."""
        return self.files[-1] if self.files else self.script

    def located(self, path: str) -> Path | None:
        """Find a file or folder that the script names.

        Relative paths are looked up in the script's folder and in all folders above it.  So is the end of a path of
        another machine: ``/root/slime/scripts/x.sh`` is found as ``scripts/x.sh``.
        """
        if os.path.isabs(path) and os.path.exists(path):
            return Path(path)
        folders = [self.file.parent, *self.script.parents]
        names = Path(path).parts[1:] if os.path.isabs(path) else Path(path).parts
        starts = range(len(names) - 1) if os.path.isabs(path) else range(1)
        candidates = (folder.joinpath(*names[start:]) for start in starts for folder in folders)
        return next((each for each in candidates if os.path.exists(each)), None)

    def place(self, node: Any) -> str:
        """Return the file and line of a syntax node."""
        return f"{self.file.name}:{node.start_point[0] + 1}"

    def note(self, node: Any, text: str) -> None:
        """Remember a remark about the line of a syntax node, once."""
        note = Note(place=self.place(node), text=text)
        if note not in self.notes:
            self.notes.append(note)

    def set(self, name: str, value: Text, *, is_appended: bool = False) -> None:
        """Assign a variable."""
        if is_appended and name in self.scalars:
            before = self.scalars[name]
            value = Text(
                value=before.value + value.value,
                unset=before.unset + value.unset,
                unknown=before.unknown + value.unknown,
            )
        self.scalars[name] = value
        if name in self.exported:
            self.exported[name] = value

    @contextmanager
    def assigned(self, values: Mapping[str, Text]) -> Iterator[None]:
        """Assign variables for one command alone."""
        before = {name: self.scalars.get(name) for name in values}
        self.scalars.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    self.scalars.pop(name, None)
                else:
                    self.scalars[name] = value

    def forget(self, name: str, source: str) -> None:
        """Mark a variable as unknown because ``source`` sets it."""
        self.arrays.pop(name, None)
        self.scalars[name] = Text(value=f"${name}", unknown=(source,))
