"""A failure in an actor is raised under the right name, in one line."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from asyncrl.engines.cluster.calls import answered, together
from asyncrl.errors import AsyncRLError, NonFiniteLoss, ServerFailed, TrainerFailed


def task_error(cause: Exception) -> Exception:
    """The exception that Ray raises for ``cause``, which is also an instance of the cause's class."""
    from ray.exceptions import RayTaskError

    error: Exception = RayTaskError("train", "traceback", cause).as_instanceof_cause()
    return error


async def raising(error: Exception) -> None:
    raise error


def outcome(call: Coroutine[Any, Any, Any], **options: Any) -> AsyncRLError:
    with pytest.raises(AsyncRLError) as caught:
        asyncio.run(answered(call, "rank 1, train", 0.05, **options))
    return caught.value


def test_our_own_errors_pass_as_they_are() -> None:
    error = outcome(raising(task_error(NonFiniteLoss("loss nan"))))
    assert type(error) is NonFiniteLoss
    assert str(error) == "loss nan"


def test_a_timeout_inside_the_actor_is_not_taken_for_silence() -> None:
    error = outcome(raising(task_error(TimeoutError("store refused\nand more"))))
    assert type(error) is TrainerFailed
    assert str(error) == "rank 1, train: TimeoutError: store refused"


def test_a_silent_actor_raises_an_error_with_the_deadline() -> None:
    assert "no answer within 0.05 s" in str(outcome(asyncio.sleep(10)))


def test_a_dead_actor_raises_the_error_that_the_caller_chose() -> None:
    from ray.exceptions import RayActorError

    assert type(outcome(raising(RayActorError()), kind=ServerFailed)) is ServerFailed


def test_of_two_failed_calls_a_bug_is_raised_without_an_exception_group() -> None:
    with pytest.raises(KeyError):
        asyncio.run(together([raising(ServerFailed("gone")), raising(KeyError("bug"))]))
