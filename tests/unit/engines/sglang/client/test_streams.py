"""Streamed answers over real sockets: a connection is reused only when that is safe."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import uvloop

from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.machine_probes import GONE_AFTER_S
from asyncrl.engines.sglang.client.response import BrokenResponse
from asyncrl.engines.sglang.client.streams import Silent, Streams
from tests.ports import free_ports

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Server:
    """A server that answers every request alike, and counts connections and requests."""

    def __init__(self) -> None:
        self.url = ""
        self.port = 0
        self.connections = 0
        self.requests: list[bytes] = []


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Server]:
    served = Server()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                served.requests.append(head + await reader.readexactly(length))
                await answer(writer)
        writer.close()

    port = free_ports(1)[0]
    async with await asyncio.start_server(connected, "127.0.0.1", port):
        served.url, served.port = f"http://127.0.0.1:{port}/generate", port
        yield served


def sending(*pieces: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.01)

    return answer


async def hanging_up(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"2\r\nhi\r\n")
    await writer.drain()
    writer.close()


@contextlib.contextmanager
def opened(keep_alive_s: float = 5.0) -> Iterator[Streams]:
    streams = Streams(connect_s=5.0, keep_alive_s=keep_alive_s)
    try:
        yield streams
    finally:
        streams.close()


def nothing(status: int, piece: bytes) -> None:
    """Discard a piece."""


def test_an_answer_goes_piece_by_piece_through_one_connection_after_the_other_request() -> None:
    async def run() -> None:
        pieces: list[tuple[int, bytes]] = []
        async with serving(sending(HEAD + b"3\r\none\r\n", b"3\r\ntwo\r\n", END)) as server:
            with opened() as streams:
                for number in (b"1", b"2"):
                    assert await streams.post(server.url, number, 5.0, lambda *got: pieces.append(got)) == 200
        assert pieces == [(200, b"one"), (200, b"two")] * 2
        assert server.connections == 1
        assert [request[-1:] for request in server.requests] == [b"1", b"2"]
        assert server.requests[0].startswith(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "keep_alive_s"),
    [
        (sending(HEAD + END), 0.0),
        (sending(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"), 5.0),
        (sending(HEAD + END, b"bytes that were not requested"), 5.0),
    ],
    ids=["too old", "the server closes it", "out of step"],
)
def test_a_connection_that_may_be_unfit_is_not_used_again(answer: Answer, keep_alive_s: float) -> None:
    async def run() -> None:
        async with serving(answer) as server:
            with opened(keep_alive_s) as streams:
                for _ in range(2):
                    await streams.post(server.url, b"", 5.0, nothing)
                    await asyncio.sleep(0.3)
            assert server.connections == 2

    asyncio.run(run())


def test_a_server_that_hangs_up_in_the_middle_breaks_the_answer() -> None:
    async def run() -> None:
        async with serving(hanging_up) as server:
            with opened() as streams, pytest.raises(BrokenResponse):
                await streams.post(server.url, b"", 5.0, nothing)

    asyncio.run(run())


def test_silence_is_counted_from_the_last_piece() -> None:
    async def slow(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for _ in range(4):
            await asyncio.sleep(0.4)
            writer.write(b"1\r\nx\r\n")
        await asyncio.sleep(2.0)

    async def run() -> None:
        pieces: list[bytes] = []
        async with serving(slow) as server:
            with opened() as streams, pytest.raises(Silent):
                await streams.post(server.url, b"", 1.0, lambda status, piece: pieces.append(piece))
        assert pieces == [b"x"] * 4

    asyncio.run(run())


def test_an_error_of_the_callback_is_raised_and_ends_the_stream() -> None:
    calls: list[bytes] = []

    def take(status: int, piece: bytes) -> None:
        calls.append(piece)
        raise KeyError(piece)

    async def run() -> None:
        answer = sending(HEAD + b"1\r\na\r\n", b"1\r\nb\r\n", END)
        async with serving(answer) as server:
            with opened() as streams:
                with pytest.raises(KeyError):
                    await streams.post(server.url, b"", 5.0, take)
                await asyncio.sleep(0.05)
                with pytest.raises(KeyError):
                    await streams.post(server.url, b"", 5.0, take)
            assert server.connections == 2

    asyncio.run(run())
    assert calls == [b"a", b"a"]


def test_a_cancellation_ends_delivery_and_closes_the_connection() -> None:
    calls: list[bytes] = []
    answer = sending(HEAD + b"1\r\na\r\n", *[b"1\r\nb\r\n"] * 50)

    async def run() -> None:
        async with serving(answer) as server:
            with opened() as streams:
                began = asyncio.Event()

                def take(status: int, piece: bytes) -> None:
                    calls.append(piece)
                    began.set()

                async with asyncio.TaskGroup() as tasks:
                    task = tasks.create_task(streams.post(server.url, b"", 5.0, take))
                    await began.wait()
                    task.cancel()
                    num_taken = len(calls)
                await asyncio.sleep(0.1)
                assert len(calls) == num_taken
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await streams.post(server.url, b"", 5.0, nothing)
            assert server.connections == 2

    asyncio.run(run())


def kernels_patience(port: int) -> tuple[int, int]:
    """Return the seconds after which the kernel gives up a silent machine, and one that does not confirm bytes."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.fromfd(int(descriptor), socket.AF_INET, socket.SOCK_STREAM) as same:
            if same.getpeername() == ("127.0.0.1", port) and same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                names = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT
                idle, every, num, unconfirmed = (same.getsockopt(socket.IPPROTO_TCP, name) for name in names)
                return idle + every * num, unconfirmed // 1000
    raise AssertionError("the kernel probes no connection")


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_the_kernel_gives_up_a_machine_that_has_vanished(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def run() -> tuple[int, int]:
        async with serving(sending(HEAD + END)) as server:
            with opened() as streams:
                await streams.post(server.url, b"", 5.0, nothing)
                found = kernels_patience(server.port)
            await asyncio.sleep(0.05)  # the server closes the connection, too
        return found

    with asyncio.Runner(loop_factory=make_loop) as runner:
        assert runner.run(run()) == (GONE_AFTER_S, GONE_AFTER_S)


def test_the_kernel_probes_the_connections_of_commands_as_well() -> None:
    async def run() -> tuple[int, int]:
        async with serving(sending(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")) as server, HttpClient() as http:
            await http.command(server.url, {}, 5.0)
            return kernels_patience(server.port)

    assert asyncio.run(run()) == (GONE_AFTER_S, GONE_AFTER_S)
