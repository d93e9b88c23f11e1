"""A data worker: ``python -m asyncrl.data.streaming.worker``, started by ``workers``.

Reads WorkerSettings and then numbers of blocks from standard input.  Answers STARTED, and then BlockPrompts or the text
of an error for each block.  Ends when standard input does, so also when the run is killed.
"""

import os
import signal
import sys
from array import array
from typing import IO

from asyncrl.data.making import Broken, Made, PromptMaker, TooLong
from asyncrl.data.raw_rows import PromptFile
from asyncrl.data.streaming.wire import STARTED, BlockPrompts, WorkerSettings, framed, pack, read_message
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.errors import DataError


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until there are no more."""
    settings: WorkerSettings = read_message(requests)
    maker = PromptMaker(settings.data, load_tokenizer(settings.checkpoint))
    _send(answers, STARTED)
    while True:
        try:
            file, block = read_message(requests)
        except EOFError:
            return
        _send(answers, _answer(maker, settings.files[file], block))


def read_block(maker: PromptMaker, file: PromptFile, block: int) -> BlockPrompts:
    """Read and tokenise a block.  Raises DataError or OSError."""
    rows, num_lines = file.read(block)
    places, packed, broken, too_long = array("q"), [], [], 0
    for made in maker.made(rows):
        match made:
            case Made():
                places.append(made.place)
                packed.append(pack(made))
            case TooLong():
                too_long += 1
            case Broken():
                broken.append(made)
    return BlockPrompts(
        places=places, packed=tuple(packed), too_long=too_long, broken=tuple(broken), num_lines=num_lines
    )


def _send(answers: IO[bytes], message: BlockPrompts | str) -> None:
    answers.write(framed(message))
    answers.flush()


def _answer(maker: PromptMaker, file: PromptFile, block: int) -> BlockPrompts | str:
    try:
        return read_block(maker, file, block)
    except OSError as error:
        return f"{file.path}: {error.strerror or error}"
    except DataError as error:
        return str(error)


def main() -> None:
    """Serve on standard input and output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the run ends its workers
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not reach the answers
    try:
        serve(sys.stdin.buffer, answers)
    except BrokenPipeError:
        os._exit(0)  # the run is gone


if __name__ == "__main__":
    main()
