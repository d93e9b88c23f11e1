"""The episodes that are open in the process of user code, and their questions to the controller."""

import asyncio
from array import array
from dataclasses import fields
from itertools import count
from typing import Any

from asyncrl.episodes import EpisodeStart, GeneratedTurn
from asyncrl.errors import EpisodeEnded
from asyncrl.rollouts.interfaces import EpisodeAddress
from asyncrl.rollouts.user_process.messages import Ask, Unask, to_controller
from asyncrl.rollouts.user_process.plain_values import plain
from asyncrl.rollouts.user_process.wire import Wire
from asyncrl.types import SamplingParams


class OpenEpisode:
    """One episode, as ``interfaces.EpisodeCall`` describes it."""

    def __init__(self, call: int, start: EpisodeStart, address: EpisodeAddress, wire: Wire) -> None:
        self.start = start
        self.address = address
        self._call = call
        self._wire = wire
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[GeneratedTurn]] = {}
        self._is_closed = False

    async def generate(
        self,
        token_ids: tuple[int, ...],
        sampling: SamplingParams | None = None,
        *,
        conversation: int = 0,
        reason: str | None = None,
    ) -> GeneratedTurn:
        """Ask the controller for a turn.  Cancelling it aborts the request."""
        if self._is_closed:
            await asyncio.sleep(0)  # a function that catches this error and asks again must not hold the loop
            raise EpisodeEnded(f"{self.start.name}: the episode is over", "over")
        ask = next(self._numbers)
        settings = None if sampling is None else _changes(sampling, self.start.sampling)
        message = to_controller(Ask(self._call, ask, _packed_ids(token_ids), settings, conversation, reason))
        answer: asyncio.Future[GeneratedTurn] = asyncio.get_running_loop().create_future()
        self._waiting[ask] = answer
        try:
            await self._wire.send(message)
            return await answer
        except asyncio.CancelledError:
            if not self._is_closed:
                self._wire.post(to_controller(Unask(self._call, ask)))
            raise
        finally:
            del self._waiting[ask]

    def answer(self, ask: int, turn: GeneratedTurn | Exception) -> None:
        """Resume the ``generate`` that asked."""
        future = self._waiting.get(ask)
        if future is None or future.done():  # cancelled meanwhile
            return
        if isinstance(turn, Exception):
            future.set_exception(turn)
        else:
            future.set_result(turn)

    def close(self) -> None:
        """Refuse further questions, and end all that wait."""
        self._is_closed = True
        for ask in tuple(self._waiting):
            self.answer(ask, EpisodeEnded(f"{self.start.name}: the episode is over", "over"))


class Calls:
    """The open episodes by call."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._open: dict[int, OpenEpisode] = {}

    def opened(self, call: int, start: EpisodeStart, address: EpisodeAddress) -> OpenEpisode:
        """Open an episode until ``close``."""
        episode = self._open[call] = OpenEpisode(call, start, address, self._wire)
        return episode

    def answer(self, call: int, ask: int, turn: GeneratedTurn | Exception) -> None:
        """Hand an answer of the controller to its episode, if that is still open."""
        if (episode := self._open.get(call)) is not None:
            episode.answer(ask, turn)

    def close(self, call: int) -> None:
        """Close an episode; no-op for any other call."""
        if (episode := self._open.pop(call, None)) is not None:
            episode.close()


def _packed_ids(token_ids: tuple[int, ...]) -> Any:
    """Return token ids as an array.  Raises ValueError for a value that is no token id."""
    try:
        return plain(array("q", token_ids), []) if len(token_ids) else []
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token ids must be integers: {error}") from None


def _changes(sampling: SamplingParams, usual: SamplingParams) -> dict[str, Any]:
    """Return the settings that differ from the episode's, in plain types.  Raises ValueError for any other."""
    left_out: list[str] = []
    names = (each.name for each in fields(SamplingParams))
    found = {name: getattr(sampling, name) for name in names if getattr(sampling, name) != getattr(usual, name)}
    changes = plain(found, left_out)
    if left_out:
        raise ValueError(f"sampling settings must be JSON values, got {', '.join(left_out)}")
    return dict(changes)
