"""The program of a user's ``async def episode(ep)``."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.episodes import EpisodeEnd
from asyncrl.errors import EpisodeEnded, ToolFailed, name_of, plainly
from asyncrl.rollouts.interfaces import EpisodeCall
from asyncrl.rollouts.native import Episode, EpisodeSettings
from asyncrl.rollouts.session import Verdict

logger = logging.getLogger(__name__)

EpisodeFunction = Callable[[Episode], Awaitable[Any]]
"""A user's function.  It returns nothing."""

_LIMITS = {EpisodeEnd.MAX_TURNS.value, EpisodeEnd.CONTEXT_FULL.value}


class NativeProgram:
    """Runs a user's function for one episode after the other; see ``interfaces.EpisodeProgram``."""

    def __init__(self, function: EpisodeFunction, settings: EpisodeSettings) -> None:
        self._function = function
        self._settings = settings

    async def __call__(self, call: EpisodeCall, /) -> Verdict:
        """Run one episode.  Raises what the function raises, but for limits of the episode and tools that failed."""
        episode = Episode(call, self._settings)
        try:
            with plainly():  # a function may run its tools in a TaskGroup
                result = await self._function(episode)
        except EpisodeEnded as error:
            if error.reason not in _LIMITS:
                raise
        except ToolFailed as error:
            logger.info("%s: a tool failed: %s", call.start.name, error)
            return episode.verdict(EpisodeEnd.TOOL_FAILED)
        else:
            if result is not None:
                name, kind = name_of(self._function), type(result).__name__
                raise TypeError(f"{name} must return None, got a {kind}; set ep.reward for a reward")
        return episode.verdict()
