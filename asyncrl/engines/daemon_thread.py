"""Blocking work in a thread that the process does not wait for at its end."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread


def in_daemon_thread(work: Callable[[], None], name: str) -> Future[None]:
    """Start ``work`` in a daemon thread; the future completes with it, and cannot be cancelled.

    A process that ends does not wait for the thread, as it would with ``asyncio.to_thread``.
    """
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # from now on the future cannot be cancelled

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (raised where the future is awaited)
            future.set_exception(error)
        else:
            future.set_result(None)

    # Invariant: only this thread completes the future.  At the end of the process it stops wherever it is, so ``work``
    # must leave nothing on disk that could be taken for complete.
    Thread(target=run, name=name, daemon=True).start()
    return future
