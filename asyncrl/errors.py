"""Errors, named by cause.

    AsyncRLError
    ├── ConfigError            the run description is wrong; nothing was started          exit code 2
    │   ├── DataError          a prompt file is missing, malformed or lacks a key          exit code 2
    │   └── PluginError        a user function does not import or has the wrong shape      exit code 2
    ├── NotNow                 nothing was started, and a later start may succeed          exit code 1
    ├── EngineError            a rollout engine failed
    │   ├── EngineTimeout      no answer in time; the request was aborted                  [retry]
    │   ├── EngineLost         the connection or the server is gone                        [retry]
    │   └── EngineRejected     the server refused the request (4xx)
    ├── RewardFailed           a reward function raised on one sample                      [budget]
    │   ├── RewardKeyMissing   a reward is a dict, and --reward-key names none of its entries
    │   └── RewardUnavailable  a reward did not reach its service; the call is repeated
    ├── RewardOutage           the service of the rewards was away for too long; the run stops
    ├── FilterFailed           a filter raised on one group                                [budget]
    ├── SourceFailed           prompts could not be read any more, after steps were trained; the run stops
    ├── HookFailed             a hook or a data source of the user failed; the run stops
    ├── SampleFailed           one sample failed after its last retry                      [budget]
    ├── EpisodeFailed          a user's episode raised, took too long or lost its process  [budget]
    ├── EpisodeEnded           a request of an episode that is over, or past one of its limits
    ├── ToolFailed             a tool of an episode raised; the episode ends unless its function catches it
    │   └── ToolTimeout        a tool took too long
    ├── UserProcessFailed      the process of user code cannot be kept running; the run stops
    ├── SandboxFailed          a sandbox cannot isolate or start a program                 [budget]
    ├── FailureBudgetSpent     too many groups failed in a row; the run stops
    ├── FilterBudgetSpent      the filter rejected too many groups in a row; the run stops
    ├── ServerFailed           a process that we started died or did not get ready
    ├── TrainerFailed          a trainer rank died, raised or did not answer in time
    │   └── TrainerOutOfMemory a GPU had too little memory for a training step
    ├── NonFiniteLoss          the loss is NaN or infinite; no weights were changed
    ├── FastStepWrong          a fast operation of the trainer differs from its plain form; nothing was trained
    ├── CheckpointFailed       a checkpoint could not be written or read; earlier ones are intact
    ├── JournalDamaged         a record of a run's journal fails its checksum; the message names file and byte
    ├── LeaseLost              another run has taken over the folder of --save; nothing more is written to it
    ├── WeightUpdateFailed     engines and trainer no longer agree on the weights
    ├── InternalsChanged       an installed package differs from the version that asyncrl was written for
    ├── SamplesMissing         the file of a step's samples did not appear (asked by a program that drives a run)
    ├── GpuSharingFailed       engines and trainer could not hand over the GPUs that they share
    └── Stalled                nothing moved for too long; the message lists what is being waited for

After a [retry] error the request is sent again with the tokens generated so far.  A [budget] error drops one group.
Any other exception is a bug and ends the run.  Arguments are kept in ``args``, so every error can be pickled.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial


class AsyncRLError(Exception):
    """Base of every failure that this package names."""


class ConfigError(AsyncRLError, ValueError):
    """The run description is wrong; nothing was started."""


class DataError(ConfigError):
    """A prompt file is missing, malformed or lacks a key."""


class PluginError(ConfigError):
    """A user function does not import or has the wrong shape."""


class NotNow(AsyncRLError):
    """The state of a machine, a disk or another run prevents this run; nothing was started.

    The same command may succeed later or elsewhere, so launchers try it again.
    """


class EngineError(AsyncRLError):
    """A rollout engine failed."""


class EngineTimeout(EngineError, TimeoutError):
    """No answer came in time; the request was aborted."""


class EngineLost(EngineError, ConnectionError):
    """The connection or the server is gone."""


class EngineRejected(EngineError):
    """The server refused the request."""


class RewardFailed(AsyncRLError):
    """A reward function raised on one sample."""


class RewardKeyMissing(RewardFailed):
    """A reward function returned a dict, and no ``--reward-key`` names the entry that counts.  No row is to blame."""


class RewardUnavailable(RewardFailed):
    """A reward did not reach its service, and another attempt may.

    ``reached`` is False only if there was no connection.  Any other failure may be the answer's fault: one that makes
    the service disconnect, or its proxy report 502 to 504, must not hold up the run forever.  With ``is_late`` the
    reward function itself was silent for its whole time limit.
    """

    def __init__(self, text: str, reached: bool, is_late: bool = False) -> None:
        super().__init__(text, reached, is_late)
        self.reached = reached
        self.is_late = is_late

    def __str__(self) -> str:
        return str(self.args[0])


class RewardOutage(AsyncRLError, TimeoutError):
    """Every call to the service of the rewards failed for too long."""


class FilterFailed(AsyncRLError):
    """A filter raised on one group, which is dropped, or a buffer filter raised, which ends the run."""


class SourceFailed(AsyncRLError):
    """Prompts could not be read any more, after the run had trained steps; the run ends."""


class HookFailed(AsyncRLError):
    """A hook or a data source of the user raised, took too long, or returned a wrong result; the run ends."""


class SampleFailed(AsyncRLError):
    """One sample failed after its last retry."""


class EpisodeFailed(AsyncRLError):
    """A user's episode raised, took too long, returned a wrong result, or lost its process; its group is dropped."""


class EpisodeEnded(AsyncRLError):
    """A request of an episode that is over or past a limit.  ``reason`` names which: see ``episodes.EpisodeEnd``."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class ToolFailed(AsyncRLError):
    """A tool of an episode raised."""


class ToolTimeout(ToolFailed, TimeoutError):
    """A tool of an episode took too long."""


class UserProcessFailed(AsyncRLError):
    """The process of user code does not start, or ends again and again."""


class SandboxFailed(AsyncRLError):
    """The machine does not allow a sandbox's isolation, or the program in it could not be started."""


class FailureBudgetSpent(AsyncRLError):
    """Too many groups failed in a row."""


class FilterBudgetSpent(AsyncRLError):
    """The filter rejected too many groups in a row."""


class ServerFailed(AsyncRLError):
    """A process that we started died or did not get ready."""


class EngineSlow(ServerFailed):
    """An engine decodes far slower than the others."""


class ForeignServer(ServerFailed):
    """Another program answers at the address of one of our servers; it accepts every key, or not the run's."""


class TrainerFailed(AsyncRLError):
    """A trainer rank died, raised or did not answer in time."""


class TrainerOutOfMemory(TrainerFailed):
    """A GPU had too little memory for a training step, also in smaller microbatches where these were possible."""


class NonFiniteLoss(AsyncRLError, ArithmeticError):
    """The loss is NaN or infinite; no weights were changed."""


class FastStepWrong(AsyncRLError):
    """A fast operation of a training step differs from its plain form; nothing was trained."""


class CheckpointFailed(AsyncRLError):
    """A checkpoint could not be written or read; earlier checkpoints are intact."""


class JournalDamaged(AsyncRLError):
    """The journal of a run cannot be read: a record in it is damaged, or a file is no journal.

    ``file`` and ``offset`` name the place.
    """

    def __init__(self, text: str, file: str, offset: int) -> None:
        super().__init__(text, file, offset)
        self.file = file
        self.offset = offset

    def __str__(self) -> str:
        return f"{self.file}, byte {self.offset}: {self.args[0]}"


class LeaseLost(AsyncRLError):
    """Another run has taken over the folder of ``--save``; this run writes nothing more to it."""


class WeightUpdateFailed(AsyncRLError):
    """Engines and trainer no longer agree on the weights."""


class UpdateInterrupted(WeightUpdateFailed):
    """An engine was lost during the update; the update must start again with the remaining engines."""


class InternalsChanged(AsyncRLError):
    """An installed package differs from the version that asyncrl was written for.

    Without this check, the run would fail later or train wrongly.
    """


class GpuSharingFailed(AsyncRLError):
    """Engines and trainer could not hand over the GPUs that they share."""


class SamplesMissing(AsyncRLError, TimeoutError):
    """The file of a step's samples did not appear."""


class Stalled(AsyncRLError, TimeoutError):
    """Nothing moved for too long."""


_LASTING = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
"""Errors of the operating system by which a path is wrong; any other may be an outage or a full disk."""


def unusable(line: str, error: OSError) -> ConfigError | NotNow:
    """Return the error with ``line`` for a path that cannot be used: ConfigError if the path is wrong, else NotNow."""
    return ConfigError(line) if error.errno in _LASTING else NotNow(line)


_OF_THIS_MACHINE = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.ENETUNREACH)
)
"""Reasons why this machine can make no connection to any other."""


def is_out_of_reach(error: EngineError) -> bool:
    """Return whether no connection to the engine could be made or kept, for a reason outside this machine."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno not in _OF_THIS_MACHINE


@contextmanager
def plainly() -> Iterator[None]:
    """Raise one plain error of a TaskGroup instead of an ExceptionGroup; a bug takes precedence over a named error.

    Every TaskGroup is wrapped in this, because no outer ``except EngineLost`` matches an ExceptionGroup.
    """
    try:
        yield
    except BaseExceptionGroup as errors:
        _, bugs = errors.split(AsyncRLError)
        raise _first(bugs or errors) from errors


def name_of(function: object) -> str:
    """Return the name of a user's function for errors; that of the function in it for a ``functools.partial``."""
    while isinstance(function, partial) and not hasattr(function, "__name__"):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def label_of(function: object) -> str:
    """Return ``: `` with the flag and path of a user's function, for errors; empty if it was not named by a path."""
    label = getattr(function, "user_label", "")
    return f": {label}" if label else ""


_FRAME = re.compile(r'^[\s|]*File "([^"<]+)", line (\d+), in (.+)$', re.MULTILINE)
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep


def place_in(text: str) -> str:
    """Return the innermost frame of user code in the text of a traceback, for the end of an error; empty without one.

    Frames of installed packages count only if there are no others.
    """
    return _place(_FRAME.findall(text))


def place_of(error: BaseException) -> str:
    """Return the place of user code at which ``error`` was raised, as ``place_in`` does.  Reads no file."""
    frames, step = [], error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        frames.append((code.co_filename, str(step.tb_lineno), code.co_name))
        step = step.tb_next
    return _place(frames)


def _place(frames: Iterable[tuple[str, str, str]]) -> str:
    others = [frame for frame in frames if not frame[0].startswith((_OURS, "<"))]
    own = [frame for frame in others if not frame[0].startswith(_LIBRARY) and "site-packages" not in frame[0]]
    if not others:
        return ""
    file, line, name = (own or others)[-1]
    return f" ({os.path.basename(file)}:{line}, in {name})"


def first_line(error: BaseException) -> str:
    """Return the first line of the error's text, or the name of its type if the text is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
