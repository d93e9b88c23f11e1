"""A server that answers ``POST /generate`` as SGLang does, at almost no cost: it serializes its events in advance.

``benchmarks.controller`` starts it as a separate process.  It prints its port and ends when its standard input is
closed.  Answers advance in slices of time, like those of an engine that decodes all requests in one batch.
``POST /update_weight_version`` changes the version in all later events, also of answers that have started.  So the
samples can be trained, and become stale, as in a run.
"""

import argparse
import asyncio
import bisect
import itertools
import random
import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any, cast

import orjson
import uvloop

from asyncrl.engines.sglang.labels import PACKED, STAMPS
from asyncrl.engines.sglang.packed import pack

SLICE_S = 0.005
"""Seconds between two checks for due answers.  A decode step of a large batch takes 10 ms and more."""
VOCABULARY = 50_000
"""Token ids are drawn below this: five digits, as most have in today's vocabularies of 100,000 to 200,000."""
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_STAMP = "weights now"
"""The placeholder for the version in the prepared events."""
_NOTHING = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


def tokens_of_answer(num_tokens: int) -> list[int]:
    """The token ids of every answer of this length."""
    return random.Random(num_tokens).choices(range(256, VOCABULARY), k=num_tokens)


def sizes(num_tokens: int, interval: int) -> list[int]:
    """Tokens of each event: SGLang sends the first token at once, and the remainder at the end."""
    edges = [0, *range(1, num_tokens, interval), num_tokens]
    return [stop - start for start, stop in itertools.pairwise(edges)]


def payloads(num_tokens: int, interval: int, *, is_plain: bool) -> Iterator[bytes]:
    """The events of one answer, for ``stamped``; ``is_plain``: not packed, as by a server without our plug-in."""
    tokens, draw, done = tokens_of_answer(num_tokens), random.Random(interval), 0
    for size in sizes(num_tokens, interval):
        new, done = tokens[done : done + size], done + size
        # SGLang widens float32 to float64, which takes 16 to 20 digits to write; so does this many random bits.
        logprobs = [[-draw.expovariate(2.0), token, None] for token in new]
        event = _event(new, logprobs, done, done == num_tokens)
        yield b"data: " + orjson.dumps(event if is_plain else pack(event)) + b"\n\n"


def stamped(payload: bytes, version: str) -> bytes:
    """The event as it is sent, with all its tokens from weights ``version``."""
    stamp = _STAMP.encode()
    length = len(payload) + payload.count(stamp) * (len(version) - len(stamp))
    return b"%x\r\n%b\r\n" % (length, payload.replace(stamp, version.encode()))


def _event(new: list[int], logprobs: list[list[Any]], done: int, is_last: bool) -> dict[str, Any]:
    """An event with the fields of sglang 0.5.16 with --incremental-streaming-output, and of our plug-in in it."""
    return {
        "text": "word" * len(new),
        "output_ids": new,
        "meta_info": {
            "id": f"{PACKED}g1234567.12/0123abcd.",
            "finish_reason": {"type": "length", "length": done} if is_last else None,
            "prompt_tokens": 512,
            "weight_version": _STAMP,
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": logprobs,
            "reasoning_tokens": 0,
            "completion_tokens": done,
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "dp_rank": None,
            STAMPS: [_STAMP] * len(new),
            "e2e_latency": 12.345678901234567,
        },
    }


class AnswerPacer:
    """Sends the events of all answers, each when an engine would have generated its tokens."""

    def __init__(self, num_tokens: int, interval: int, answer_s: float, num_cut: int, *, is_plain: bool) -> None:
        """Cut the first ``num_cut`` answers to lengths spread evenly, so that the load is even from the start."""
        self._payloads = list(payloads(num_tokens, interval, is_plain=is_plain))
        self.update("0")
        self._slices = [max(1, round(size * answer_s / num_tokens / SLICE_S)) for size in sizes(num_tokens, interval)]
        ends = list(itertools.accumulate(self._slices))
        self._first = deque(_cut(ends, random.Random(1), num_cut))
        self._due: defaultdict[int, list[tuple[asyncio.Transport, int]]] = defaultdict(list)
        self._slice = 0

    def update(self, version: str) -> None:
        """Send all later events with this version."""
        self._pieces = [stamped(payload, version) for payload in self._payloads]

    def answer(self, transport: asyncio.Transport) -> None:
        """Start an answer on this connection."""
        transport.write(_HEAD)
        place, wait = self._first.popleft() if self._first else (0, self._slices[0])
        self._due[self._slice + wait].append((transport, place))

    async def run(self) -> None:
        """Send the due events, slice by slice, until cancelled."""
        now = asyncio.get_running_loop().time
        began = now()
        while True:
            await asyncio.sleep(max(0.0, began + (self._slice + 1) * SLICE_S - now()))
            self._slice += 1
            for transport, place in self._due.pop(self._slice, ()):
                if not transport.is_closing():
                    self._send(transport, place)

    def _send(self, transport: asyncio.Transport, place: int) -> None:
        if place == len(self._pieces) - 1:
            transport.write(self._pieces[place] + _END)
            return
        transport.write(self._pieces[place])
        self._due[self._slice + self._slices[place + 1]].append((transport, place + 1))


def _cut(ends: list[int], draw: random.Random, num_cut: int) -> Iterator[tuple[int, int]]:
    """The start of each cut answer: the index of its next event, and the number of slices until then."""
    for number in draw.sample(range(num_cut), num_cut):
        at = number * ends[-1] // num_cut
        place = bisect.bisect_right(ends, at)
        yield place, ends[place] - at


class Connection(asyncio.Protocol):
    """One connection of the client, which sends one request after the other."""

    def __init__(self, pace: AnswerPacer) -> None:
        self._pace = pace
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        if blank and len(body) >= _length(head):
            self._received = b""
            if head.startswith(b"POST /generate "):
                self._pace.answer(self._transport)
                return
            if head.startswith(b"POST /update_weight_version "):
                self._pace.update(orjson.loads(body)["new_version"])
            self._transport.write(_NOTHING)


def _length(head: bytes) -> int:
    _, found, rest = head.lower().partition(b"content-length:")
    return int(rest.split(b"\r\n", 1)[0]) if found else 0


async def serve(num_tokens: int, interval: int, answer_s: float, num_cut: int, *, is_plain: bool) -> None:
    """Serve until the standard input is closed; an answer takes ``answer_s`` seconds."""
    loop, pace = asyncio.get_running_loop(), AnswerPacer(num_tokens, interval, answer_s, num_cut, is_plain=is_plain)
    server = await loop.create_server(lambda: Connection(pace), "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(pace.run(), name="pace")
        await asyncio.to_thread(sys.stdin.read)
        sending.cancel()


def main() -> None:
    """Serve with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-tokens", type=int, required=True, help="tokens of an answer")
    parser.add_argument("--interval", type=int, required=True, help="tokens per event")
    parser.add_argument("--answer-s", type=float, required=True, help="seconds from the first event to the last")
    parser.add_argument("--plain", action="store_true", help="answers of SGLang without our plug-in")
    parser.add_argument("--num-cut", type=int, required=True, help="number of cut answers at the start")
    chosen = parser.parse_args()
    uvloop.run(serve(chosen.num_tokens, chosen.interval, chosen.answer_s, chosen.num_cut, is_plain=chosen.plain))


if __name__ == "__main__":
    main()
