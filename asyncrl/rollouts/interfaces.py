"""The interfaces between the ways in: the gateway, user code in its process, and the programs that it consists of."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.episodes import EpisodeStart, GeneratedTurn
from asyncrl.rollouts.session import EpisodeSession, Verdict
from asyncrl.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeAddress:
    """The address of one episode at the gateway."""

    host: str
    port: int
    key: str = field(repr=False)
    """Names the episode; clients send it as API key, as user name of the URL, or as ``X-SMG-Routing-Key``."""
    secret: str = field(repr=False)
    """The password that belongs to ``key`` in URLs, because some clients send no user name without one."""


class Gateway(Protocol):
    """The HTTP server of the controller through which clients reach their episodes."""

    def open(self, session: EpisodeSession) -> EpisodeAddress:
        """Accept requests for the episode until ``close``."""

    def close(self, address: EpisodeAddress) -> None:
        """Answer further requests for the episode with one named error, and end those in progress.  Idempotent."""


class EpisodeCall(Protocol):
    """One episode as a program in the user's process sees it."""

    @property
    def start(self) -> EpisodeStart:
        """The task."""

    @property
    def address(self) -> EpisodeAddress:
        """The address of the episode at the gateway."""

    async def generate(
        self,
        token_ids: tuple[int, ...],
        sampling: SamplingParams | None = None,
        *,
        conversation: int = 0,
        reason: str | None = None,
    ) -> GeneratedTurn:
        """Ask the controller for a turn: see ``EpisodeSession.generate``, which raises the same errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlimeResult:
    """The samples that a function of slime's shape returned, each as the state of its object."""

    samples: tuple[dict[str, Any], ...]
    is_list: bool
    """Whether the function returned a list (fan-out)."""


class EpisodeProgram(Protocol):
    """User code that runs episodes in its process; made there once, by ``ProgramFactory``."""

    async def __call__(self, call: EpisodeCall, /) -> Verdict | SlimeResult:
        """Run one episode.  May raise any exception, which costs the episode's group."""


type ProgramFactory = Callable[[], EpisodeProgram]
"""Makes a program.  It is pickled to the user's process, so it is a module-level function or a partial of one."""
