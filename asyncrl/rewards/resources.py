"""The processes and connections of a run's rewards.

Rewards are built before a run starts anything, and find these resources when they are called:

    async with RewardResources(settings) as rewards:      in the run's supervised tree
        reward(prompt, sample) ──▶ resources() ──▶ workers, model processes, services

The current resources are a context variable, so every task that the run starts inside the block finds them.
"""

from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp

from asyncrl.errors import RewardFailed
from asyncrl.outages import OUTAGE_S, Holds
from asyncrl.rewards.model_process import ModelProcess
from asyncrl.rewards.pool import WorkerPool
from asyncrl.rewards.remote import RemoteService
from asyncrl.types import Prompt, Reward, Sample

_CURRENT: "ContextVar[RewardResources]" = ContextVar("reward resources")


class UserCode(Protocol):
    """The processes of user code."""

    async def ready(self) -> None:
        """Wait until the processes have loaded their programs."""

    async def score(self, program: str, prompt: Prompt, samples: tuple[Sample, ...]) -> list[Reward]:
        """Return the rewards of a program.  Raises RewardFailed; cancelling it cancels the function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """The limits of a run's rewards."""

    num_workers: int
    memory_gb: float
    """Address space of a worker."""
    timeout_s: float
    """Deadline of one call, counted from its start in a worker, or of one HTTP attempt."""
    start_timeout_s: float
    """Deadline of the workers' imports, and of the construction of a class reward."""
    rm_concurrency: int
    outage_s: float = OUTAGE_S
    """Longest outage of a service that is waited out; 0: none is."""
    preload: tuple[str, ...] = ("math_verify",)
    """Modules that workers have imported before their first answer."""


def resources() -> "RewardResources":
    """Return the resources of the run.  Raises RewardFailed outside of a run."""
    try:
        return _CURRENT.get()
    except LookupError:
        raise RewardFailed("this reward needs worker processes, which only a run has") from None


class RewardResources:
    """The workers, model processes and services of a run.  Each starts on first use; all end with the block."""

    def __init__(
        self, settings: RewardSettings, training: object | None = None, user_code: UserCode | None = None
    ) -> None:
        """``training`` is the reward of training: only an outage of its service is a ``reason``."""
        self._user_code = user_code
        self._settings = settings
        self._training = training
        self._opened = AsyncExitStack()
        self._session: aiohttp.ClientSession | None = None
        self._models: dict[bytes, ModelProcess] = {}
        self._services: dict[str, RemoteService] = {}
        self._changed: list[Callable[[], None]] = []
        self._token: Token[RewardResources] | None = None
        self.pool = WorkerPool(
            settings.num_workers,
            timeout_s=settings.timeout_s,
            memory_gb=settings.memory_gb,
            preload=settings.preload,
        )
        """The workers of graders and of plain user functions."""

    async def __aenter__(self) -> Self:
        await self._opened.enter_async_context(self.pool)
        self._token = _CURRENT.set(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes and close all connections."""
        if self._token is not None:
            _CURRENT.reset(self._token)
        for model in self._models.values():
            self._opened.push_async_exit(model.pool)
        if self._session is not None:
            self._opened.push_async_callback(self._session.close)
        await self._opened.aclose()

    async def warm(self, rewards: Iterable[Any]) -> None:
        """Start what ``rewards`` need.  Raises RewardFailed if it is not ready within ``start_timeout_s``."""
        rewards = tuple(rewards)
        if any(getattr(reward, "needs_pool", False) for reward in rewards):
            await self.pool.warm(self._settings.start_timeout_s)
        for reward in rewards:
            if hasattr(reward, "warm"):
                await reward.warm()

    def user_code(self) -> UserCode:
        """Return the processes of user code.  Raises RewardFailed if the run has none."""
        if self._user_code is None:
            raise RewardFailed("this reward needs a process of user code, which only a run has")
        return self._user_code

    def model(self, resolver: bytes) -> ModelProcess:
        """Return the process of a class reward."""
        if resolver not in self._models:
            limits = self._settings
            pool = WorkerPool(1, timeout_s=limits.timeout_s, memory_gb=None)
            self._models[resolver] = ModelProcess(
                pool, resolver, timeout_s=limits.timeout_s, load_timeout_s=limits.start_timeout_s
            )
        return self._models[resolver]

    def service(self, url: str, user: object) -> RemoteService:
        """Return the client of the service at ``url``, for the reward ``user``."""
        if self._session is None:
            limit = aiohttp.TCPConnector(limit=self._settings.rm_concurrency)
            self._session = aiohttp.ClientSession(connector=limit, timeout=aiohttp.ClientTimeout(total=None))
        if url not in self._services:
            limits = self._settings
            service = RemoteService(
                url,
                self._session,
                concurrency=limits.rm_concurrency,
                timeout_s=limits.timeout_s,
                outage_limit_s=limits.outage_s,
            )
            service.breaker.notify(self._tell)
            self._services[url] = service
        service = self._services[url]
        if user is self._training and not service.breaker.holds_groups:
            service.breaker.holds_groups = True
            self._tell()
        return service

    @property
    def reason(self) -> str | None:
        """A line on who waits for which service of training; None if no such service is down."""
        return self._training_services.reason

    @property
    def since(self) -> float | None:
        """Start of the present outage of a service of training; None if no such service is down."""
        return self._training_services.since

    @property
    def outage_s(self) -> float:
        """Seconds of all outages of services of training so far."""
        return self._training_services.outage_s

    @property
    def _training_services(self) -> Holds:
        services = (service.breaker for service in self._services.values())
        return Holds(breaker for breaker in services if breaker.holds_groups)

    def notify(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` whenever ``reason`` may have changed."""
        self._changed.append(changed)

    def _tell(self) -> None:
        for changed in self._changed:
            changed()
