"""A response is parsed alike wherever its bytes are cut, and bytes that are no response are refused."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.sglang.client.events import EventReader
from asyncrl.engines.sglang.client.response import BrokenResponse, ResponseReader

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def cut(wire: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(place, len(wire)) for place in places), len(wire)]
    return [wire[start:stop] for start, stop in itertools.pairwise(edges)]


def read(pieces: list[bytes]) -> tuple[ResponseReader, bytes]:
    response = ResponseReader()
    return response, b"".join(part for piece in pieces for part in response.feed(piece))


@given(bodies=st.lists(st.binary(min_size=1, max_size=40), max_size=5), places=st.lists(st.integers(0, 400)))
def test_chunks_are_joined_wherever_the_bytes_are_cut(bodies: list[bytes], places: list[int]) -> None:
    chunks = b"".join(b"%x;note=1\r\n%b\r\n" % (len(body), body) for body in bodies)
    wire = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nSum: 1\r\n\r\n"
    response, body = read(cut(wire, places))
    assert body == b"".join(bodies)
    assert (response.status, response.is_complete, response.keeps_alive) == (200, True, True)
    early, _ = read(cut(wire[:-1], places))
    assert not early.is_complete
    with pytest.raises(BrokenResponse):
        early.end()


@given(body=st.binary(max_size=40), places=st.lists(st.integers(0, 200)))
def test_a_body_is_as_long_as_its_head_says(body: bytes, places: list[int]) -> None:
    wire = b"HTTP/1.1 429 Too Many\r\ncontent-length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body)
    response, found = read(cut(wire, places))
    assert found == body
    assert (response.status, response.is_complete, response.keeps_alive) == (429, True, False)


def test_without_a_length_a_body_ends_with_its_connection() -> None:
    response, found = read([HEAD + b"\r\nso", b"me"])
    assert (found, response.is_complete) == (b"some", False)
    response.end()
    assert (response.is_complete, response.keeps_alive) == (True, False)


@pytest.mark.parametrize("arrived", [b"", HEAD, HEAD + b"content-length: 9\r\n\r\nshort"])
def test_a_connection_that_ends_too_early_is_broken(arrived: bytes) -> None:
    response, _ = read([arrived])
    with pytest.raises(BrokenResponse):
        response.end()


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 what\r\n\r\n",
        HEAD + b"content-length: many\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nwhat\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n-5\r\n",
        b"x" * 70_000,
        HEAD + b"long: " + b"x" * 70_000,
        HEAD + b"transfer-encoding: chunked\r\n\r\n1;note=" + b"x" * 70_000,
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"sum: 1\r\n" * 10_000,
        b"HTTP/1.1 101 Switching\r\nupgrade: other\r\nconnection: upgrade\r\n\r\n",
    ],
)
def test_bytes_that_are_not_http_are_refused(wire: bytes) -> None:
    with pytest.raises(BrokenResponse):
        read([wire])


def test_one_reader_takes_one_response_after_the_other() -> None:
    reader = ResponseReader()
    for number in (b"1", b"2"):
        reader.begin()
        assert reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n" + number) == [number]
        assert (reader.status, reader.is_complete, reader.keeps_alive) == (200, True, True)
    reader.begin()
    reader.feed(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert (reader.status, reader.is_complete, reader.keeps_alive) == (204, True, True)


def test_an_informational_head_precedes_the_response() -> None:
    response, body = read([b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"])
    assert (response.status, response.is_complete, body) == (200, True, b"hi")


@pytest.mark.parametrize("excess", [b"more", b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nmore"])
@pytest.mark.parametrize("connection", [b"keep-alive", b"close"])
def test_bytes_after_the_end_leave_the_response_whole_and_the_connection_unfit(
    connection: bytes, excess: bytes
) -> None:
    wire = b"HTTP/1.1 200 OK\r\nconnection: %b\r\ncontent-length: 2\r\n\r\nhi" % connection
    response, body = read([wire + excess])
    assert (body, response.status, response.is_complete, response.keeps_alive) == (b"hi", 200, True, False)


@given(payloads=st.lists(st.from_regex(rb"[a-z{}]{1,30}", fullmatch=True)), places=st.lists(st.integers(0, 200)))
def test_events_are_found_wherever_the_bytes_are_cut(payloads: list[bytes], places: list[int]) -> None:
    wire = b": a comment\n" + b"".join(b"data: %b\n\n" % payload for payload in payloads)
    reader = EventReader()
    assert [found for piece in cut(wire, places) for found in reader.feed(piece)] == payloads
    assert [found for payload in payloads for found in reader.feed(b"data: %b\n\n" % payload)] == payloads
