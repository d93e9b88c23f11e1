"""The messages between the controller and a process of user code.

    controller ──▶ process     pickled: the process trusts the controller
    process ──▶ controller     msgpack (``plain_values``): the controller executes nothing that user code sends

A *call* is one episode or one reward.  The process runs it until it returns, raises or is cancelled.
"""

import copyreg
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from asyncrl.episodes import EpisodeStart, GeneratedTurn
from asyncrl.rollouts.interfaces import EpisodeAddress
from asyncrl.rollouts.user_process import plain_values
from asyncrl.rollouts.user_process.wire import WireBroken, cut
from asyncrl.types import Prompt, Sample, Span, Weights

# ---- controller to process


@dataclass(frozen=True, slots=True)
class Load:
    """Make a program.  Before ``Serve`` alone.  Answered by ``Loaded``."""

    program: str
    factory: bytes
    """A pickled function without parameters that returns the program."""


@dataclass(frozen=True, slots=True)
class Log:
    """Write the standard output and error to a file from now on.  Before ``Serve`` alone."""

    path: str


@dataclass(frozen=True, slots=True)
class Serve:
    """Start the event loop and take calls."""


@dataclass(frozen=True, slots=True)
class Episode:
    """Run an episode of a program."""

    call: int
    program: str
    start: EpisodeStart
    address: EpisodeAddress


@dataclass(frozen=True, slots=True)
class Score:
    """Call a reward."""

    call: int
    program: str
    prompt: Prompt
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The turn that an ``Ask`` asked for, or the error."""

    call: int
    ask: int
    turn: GeneratedTurn | Exception


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a call.  Nothing is answered."""

    call: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer with ``Alive``."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Cancel all calls and end."""


type ToProcess = Load | Log | Serve | Episode | Score | Answer | Cancel | Ping | Stop


def _restored[T](cls: type[T], values: tuple[Any, ...]) -> T:
    """Return an object that was checked when it was made, with these values of its fields."""
    found = object.__new__(cls)
    for each, value in zip(fields(cls), values, strict=True):  # type: ignore[arg-type]
        object.__setattr__(found, each.name, value)
    return found


def _reducer(cls: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    names = [each.name for each in fields(cls)]
    values_of = attrgetter(*names) if len(names) > 1 else lambda found: (getattr(found, names[0]),)
    return lambda found: (_restored, (cls, values_of(found)))


_REDUCERS: dict[type[Any], Callable[[Any], Any]] = copyreg.dispatch_table | {
    each: _reducer(each)
    for each in (Answer, Episode, EpisodeStart, GeneratedTurn, Prompt, Sample, Score, Span, Weights)
}
"""The way in which pickle takes the values that travel often.

The standard way for frozen dataclasses lists the fields of each object, which takes 8 of 20 microseconds.
"""


def to_process(message: ToProcess) -> list[bytes]:
    """Return the pieces of a message to the process.  May raise what a value raises that cannot be pickled."""
    written = io.BytesIO()
    pickler = pickle.Pickler(written, protocol=5)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(message)
    return cut(written.getvalue())


def in_process(pieces: Sequence[bytes]) -> ToProcess:
    """Return the message of some pieces, in the process."""
    message: ToProcess = pickle.loads(b"".join(pieces))
    return message


# ---- process to controller


@dataclass(frozen=True, slots=True)
class Loaded:
    """A program was made, or ``error`` is one line that says why not."""

    program: str
    error: str | None = None
    is_mistake: bool = True
    """Whether the user's path or function is at fault, not our code."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that the program tells about itself, such as the shape of its function."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Generate a turn for an episode."""

    call: int
    ask: int
    token_ids: Any
    """A list of token ids; in the process the array that stands for it."""
    sampling: dict[str, Any] | None
    conversation: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class Unask:
    """Cancel the generation that an ``Ask`` began: the episode no longer waits for it."""

    call: int
    ask: int


@dataclass(frozen=True, slots=True)
class Returned:
    """A call returned."""

    call: int
    value: Any
    left_out: list[str]
    """Names of the parts of the result that have no plain type."""


@dataclass(frozen=True, slots=True)
class Raised:
    """A call raised."""

    call: int
    type: str
    message: str
    traceback: str
    reached: bool | None = None
    """See ``outages.reached_by``."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The event loop runs."""

    rss_bytes: int
    num_abandoned: int
    """Cancelled calls that did not end within their limit, so far."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """A program blocked the event loop; sent once per program."""

    program: str
    seconds: float


type FromProcess = Loaded | Ask | Unask | Returned | Raised | Alive | Blocked

_FROM_PROCESS = {each.__name__: each for each in (Loaded, Ask, Unask, Returned, Raised, Alive, Blocked)}


def to_controller(message: FromProcess) -> list[bytes]:
    """Return the pieces of a message to the controller.  Its values must be results of ``plain_values.plain``."""
    return plain_values.packed([type(message).__name__, *(getattr(message, each.name) for each in fields(message))])


def in_controller(message: Any) -> FromProcess:
    """Return the message of unpacked values.  Raises WireBroken."""
    try:
        name, *values = message
        return _FROM_PROCESS[name](*values)
    except (TypeError, KeyError, ValueError) as error:
        raise WireBroken(f"not a message: {error}") from error
