"""Episodes whose function runs in a process of user code: the ``EpisodeFn`` that the pipeline calls."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from asyncrl.episodes import EpisodeEnd, EpisodeOutcome, EpisodeStart, EpisodeTurns
from asyncrl.errors import AsyncRLError, EpisodeEnded, EpisodeFailed, RewardKeyMissing, place_in, plainly
from asyncrl.rollouts.interfaces import Gateway, SlimeResult
from asyncrl.rollouts.session import EpisodeLimits, EpisodeSession
from asyncrl.rollouts.user_process.host import UserProcesses
from asyncrl.rollouts.user_process.messages import Answer, Ask, Episode, Loaded, Raised, Returned, Unask
from asyncrl.rollouts.user_process.results import result_of, sampling_of
from asyncrl.rollouts.user_process.supervised import Died, OpenCall
from asyncrl.task_groups import TaskGroup

type SlimeOutcome = Callable[[EpisodeSession, SlimeResult], EpisodeOutcome]
"""Turns the samples of a function of slime's shape into the result of its episode.  Raises ValueError."""


class UserEpisodes:
    """Runs the episodes of one program."""

    def __init__(
        self,
        processes: UserProcesses,
        program: str,
        *,
        gateway: Gateway,
        limits: EpisodeLimits,
        decode: Callable[[tuple[int, ...]], str],
        slime_outcome: SlimeOutcome,
        label: str = "",
    ) -> None:
        """``label`` is the flag and path of the function, for errors."""
        self._processes = processes
        self._program = program
        self._gateway = gateway
        self._limits = limits
        self._decode = decode
        self._slime_outcome = slime_outcome
        self._label = f"{label}: " if label else ""

    async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
        """Run one episode.  Raises EpisodeFailed or RewardKeyMissing.  The caller has a deadline, and cancels this."""
        session = EpisodeSession(start, turns, self._limits, self._decode)
        address = self._gateway.open(session)
        message = partial(Episode, program=self._program, start=start, address=address)
        process = self._processes.of(start.group_id, start.prompt)
        try:
            async with process.call(message) as call:
                return await self._run(call, session)
        finally:
            session.close(EpisodeEnd.CANCELLED)
            self._gateway.close(address)

    async def _run(self, call: OpenCall, session: EpisodeSession) -> EpisodeOutcome:
        """Answer the function's questions until it returns.  Raises EpisodeFailed or RewardKeyMissing."""
        asked: dict[int, asyncio.Task[None]] = {}
        with plainly():
            async with TaskGroup() as group:
                while True:
                    match await call.receive():
                        case Ask() as ask:
                            asked[ask.ask] = group.create_task(_turn(call, session, ask))
                        case Unask(_, number):
                            if number in asked:
                                asked[number].cancel()
                        case Returned() as returned:
                            for task in asked.values():
                                task.cancel()
                            return self._outcome(session, returned)
                        case Raised() as raised:
                            raise self._failed(session, raised)
                        case Died(how):
                            raise EpisodeFailed(f"{session.start.name}: the process of its function ended: {how}")
                        case Loaded():
                            raise AssertionError("Loaded is no message of a call")
        raise AssertionError("unreachable")

    def _outcome(self, session: EpisodeSession, returned: Returned) -> EpisodeOutcome:
        self._processes.tell_left_out(returned.left_out)
        try:
            result = result_of(returned.value)
            if isinstance(result, SlimeResult):
                return self._slime_outcome(session, result)
            return session.outcome(result)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:  # of values of user code
            raise EpisodeFailed(f"{session.start.name}: {error}") from error

    def _failed(self, session: EpisodeSession, raised: Raised) -> EpisodeFailed | RewardKeyMissing:
        if raised.type == RewardKeyMissing.__name__:
            return RewardKeyMissing(f"{session.start.name}: {raised.message}")
        self._processes.tell(session.start.name, raised)
        text = f"{raised.type}: {raised.message}{place_in(raised.traceback)}"
        return EpisodeFailed(f"{session.start.name}: {self._label}{text}")


async def _turn(call: OpenCall, session: EpisodeSession, ask: Ask) -> None:
    """Generate a turn and send it, or the error, to the function."""
    try:
        turn = await session.generate(
            tuple(ask.token_ids),
            sampling_of(ask.sampling, session.start.sampling),
            conversation=ask.conversation,
            reason=ask.reason,
        )
    except (EpisodeEnded, ValueError) as error:
        await call.send(Answer(call.number, ask.ask, error))
    except AsyncRLError as error:  # of the engines, after the last retry
        await call.send(Answer(call.number, ask.ask, _without_cause(error)))
    else:
        # The session has recorded the columns; the function reads tokens and log-probs.
        await call.send(Answer(call.number, ask.ask, replace(turn, kept=None, top=None, routes=None)))


def _without_cause(error: AsyncRLError) -> AsyncRLError:
    """Return an error that can be pickled: its text counts."""
    return type(error)(*error.args)
