"""The type of a tab: a function from a request to the values of its template."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.page.runs.run_files import RunFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """One request for a tab of one run."""

    run: RunFiles
    others: Sequence[RunFiles] = ()
    """Further runs to compare with ``run``."""
    query: Mapping[str, str] = field(default_factory=dict)
    """The form and the links of the tab."""
    is_first: bool = False
    """Whether another request follows, so that this one may lack what takes long."""

    @property
    def runs(self) -> Sequence[RunFiles]:
        """The run, then the others."""
        return (self.run, *self.others)

    def number(self, name: str, otherwise: int, *, least: int = 0, most: int = 2**53) -> int:
        """Return an integer of the query; ``otherwise`` if it is missing or no number."""
        try:
            return min(max(int(self.query[name]), least), most)
        except (KeyError, ValueError):
            return otherwise


type Show = Callable[[PageRequest], Mapping[str, Any]]
"""Return the values of the tab's template.  Called in a thread, while the run's lock is held."""
type Data = Callable[[PageRequest], Any]
"""Return JSON for the script of a tab.  Called as ``Show`` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """The functions of a tab."""

    show: Show
    data: Mapping[str, Data] = field(default_factory=dict)
    """Answers to ``/run/NUMBER/KEY/data/NAME``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tab:
    """One tab."""

    key: str
    """The last part of its address, and the name of its template."""
    title: str
    views: Callable[[], Views]
    """Imports the tab's module, so that the page can start before all of them are there."""
