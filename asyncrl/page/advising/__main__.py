"""The process of a study: a request on stdin, progress and the advice as lines of JSON on stdout.

page ──{"timeline", "settings"}──▶ this process ──{"progress"} ... {"advice"} or {"problem"}──▶ page

waits for     its worker processes
on failure    the last line has the sentence
on exit       the process group ends, workers included; also as soon as stdin closes, which the page's end does
"""

import os
import signal
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import orjson

from asyncrl.errors import AsyncRLError
from asyncrl.page.advising.advice import Advice
from asyncrl.page.advising.study import study
from asyncrl.page.advising.workers import pool_of

_MOST_PROCESSES = 8
_NICE = 10
"""The run itself, if it is on this machine, comes first."""


def main() -> None:
    """Answer one request."""
    request = orjson.loads(sys.stdin.readline())
    Thread(target=_end_with_the_page, name="page's end", daemon=True).start()
    os.nice(_NICE)
    try:
        _send({"advice": _studied(request)})
    except AsyncRLError as error:
        _send({"problem": str(error)})
    except Exception as error:  # noqa: BLE001 (the page shows it; there is no other reader)
        _send({"problem": f"the simulator failed with {type(error).__name__}: {error}"})


def _studied(request: dict[str, Any]) -> Advice:
    processes = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2))
    with pool_of(processes) as pool:
        return study(
            Path(request["timeline"]), request["settings"], pool, processes, lambda text: _send({"progress": text})
        )


def _send(message: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(message).decode() + "\n")
    sys.stdout.flush()


def _end_with_the_page() -> None:
    while os.read(sys.stdin.fileno(), 4096):  # not sys.stdin, whose lock would be held while this process exits
        pass
    os.killpg(0, signal.SIGKILL)  # this process leads a group; its workers are in it


if __name__ == "__main__":
    main()
