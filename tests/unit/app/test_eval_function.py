"""slime's evaluation functions, in a thread and with the address of the router."""

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.app.checks import check
from asyncrl.app.eval_function import ThreadedEval, running_eval_function
from asyncrl.compat import BlockingEval, SlimeArgs
from asyncrl.config.eval_sets import eval_sets
from asyncrl.errors import PluginError
from tests.unit.app.test_checks import quickstart

PASS: Any = SimpleNamespace(weights=SimpleNamespace(step=3))


def threaded(function: Any) -> ThreadedEval:
    return ThreadedEval(BlockingEval(function, SlimeArgs()), dict)


def test_it_gets_the_router_and_the_sets_and_runs_off_the_event_loop() -> None:
    seen: dict[str, Any] = {}

    def mine(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        seen.update(args=args, step=rollout_id, thread=threading.current_thread())
        return {"a": {"rewards": [1.0], "truncated": [False]}}

    sets = eval_sets(quickstart("--eval-top-p", "0.7"))
    urls = iter(("http://10.0.0.1:3000", "http://10.0.0.2:4000"))
    running = running_eval_function(BlockingEval(mine, SlimeArgs(lr=1)), lambda: next(urls), "key", sets)
    outcome: Any = asyncio.run(running(PASS))
    assert outcome.rewards == {"a": (1.0,)}
    assert outcome.columns == {"a": {"rewards": [1.0], "truncated": [False]}}
    assert seen["thread"] is not threading.current_thread()
    args = seen["args"]
    assert (args.lr, args.sglang_router_ip, args.sglang_router_port, seen["step"]) == (1, "10.0.0.1", 3000, 2)
    assert args.sglang_api_key == "key"
    (only,) = args.eval_datasets
    assert (only.name, only.top_p, only.n_samples_per_eval_prompt, only.rm_type) == ("arithmetic", 0.7, 2, "number")
    asyncio.run(running(PASS))
    moved = seen["args"]
    assert (moved.sglang_router_ip, moved.sglang_router_port) == ("10.0.0.2", 4000), "the router was started elsewhere"


def test_a_native_function_runs_on_the_event_loop_and_is_named_if_it_blocks_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def mine(evaluation: Any) -> Any:
        time.sleep(0.06)  # noqa: ASYNC251
        return threading.current_thread()

    outcome: Any = asyncio.run(running_eval_function(mine, lambda: "http://a:1", "key", (), "mine.py:mine")(PASS))
    assert outcome is threading.current_thread()
    assert "--eval-function-path 'mine.py:mine' blocked the event loop for " in caplog.text


@pytest.mark.parametrize(
    ("raised", "named", "line"),
    [
        (ValueError("no"), ValueError, "no"),
        (SystemExit(3), RuntimeError, "raised SystemExit: 3"),
        (StopIteration(), RuntimeError, "raised StopIteration"),
    ],
)
def test_an_exception_of_the_thread_does_not_end_the_event_loop(
    raised: BaseException, named: type[Exception], line: str
) -> None:
    def mine(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        raise raised

    async def run() -> None:
        with pytest.raises(named, match=line):
            await threaded(mine)(PASS)

    asyncio.run(run())


def test_a_call_is_refused_while_the_thread_of_an_earlier_one_is_busy() -> None:
    begun, end, calls = threading.Event(), threading.Event(), list[int]()

    def mine(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        calls.append(rollout_id)
        begun.set()
        end.wait(30)
        return {}

    async def run() -> None:
        function = threaded(mine)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await function(PASS)
        with pytest.raises(RuntimeError, match="the call before is not over"):
            await function(PASS)
        end.set()

    asyncio.run(run())
    assert begun.wait(30)  # on a busy machine the thread begins later than the second call is refused
    assert calls == [2]


def test_a_function_that_does_not_exist_is_refused_at_the_start() -> None:
    with pytest.raises(PluginError, match="--eval-function-path 'no_such_module:f'"):
        check(quickstart("--eval-function-path", "no_such_module:f"))
