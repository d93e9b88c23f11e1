"""An event loop whose clock jumps: an hour of waiting takes no time, and waiting for ever is a reported Deadlock."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

_OWN_FILES = 1
"""The loop's end of the pipe by which other threads wake it."""


class Deadlock(Exception):
    """Every task waits and nothing is left that could wake one."""


class _JumpingSelector(selectors.BaseSelector):
    """Instead of sleeping, moves the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        is_listening = timeout is None or len(self._real.get_map()) > _OWN_FILES
        if is_listening and (ready := self._real.select(0)):
            return ready
        if timeout is None:
            raise Deadlock(f"at {self.now:g} s")
        self.now += max(0.0, timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Any:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` starts at 0 and moves only when every task waits."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually[T](main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """The result, and the virtual seconds it took."""
    with asyncio.Runner(loop_factory=VirtualLoop, debug=False) as runner:
        result = runner.run(main)
        return result, runner.get_loop().time()
