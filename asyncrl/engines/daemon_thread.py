"""Work that blocks, in a thread that nobody has to wait for."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread


def in_daemon_thread(work: Callable[[], None], name: str) -> Future[None]:
    """Begin ``work``; a process that ends does not wait for it, as it would for ``asyncio.to_thread``."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # from now on nobody can cancel it

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (handed to who waits)
            future.set_exception(error)
        else:
            future.set_result(None)

    # Invariant: only this thread completes the future.  At the end of the process it stops wherever it is, so ``work``
    # must leave nothing on disk that could be taken for complete.
    Thread(target=run, name=name, daemon=True).start()
    return future
