"""A parser (llhttp) for the HTTP/1.1 responses of one connection.  Does no input or output."""

import httptools

_MAX_OVERHEAD = 65536
"""Most bytes in a row that carry no body: a head, lines between chunks, a trailer.  Servers send a few hundred."""


class BrokenResponse(ConnectionError):
    """The server's bytes are not one complete HTTP/1.1 response."""


class ResponseReader:
    """Parses one response after the other from the bytes of a connection.

    One parser serves the whole connection.  Parser and object refer to each other, so a pair per response would be
    garbage that only the cycle collector frees, which a run calls rarely.  After BrokenResponse, or when
    ``keeps_alive`` is False, the connection must be closed.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.begin()

    def begin(self) -> None:
        """Expect the next response.  The previous one must be complete."""
        self.status = 0
        """The HTTP status; 0 until the head has arrived."""
        self.is_complete = False
        self.keeps_alive = True
        """Whether the server accepts another request on this connection."""
        self._has_end = False  # whether the head gives the body's length, or the body comes in chunks
        self._overhead = 0
        self._pieces: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Parse ``data`` and return the pieces of the body in it, in order.  Raises BrokenResponse."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.is_complete:
                raise BrokenResponse(f"not HTTP/1.1: {error}: {data[:100]!r}") from error
            self.keeps_alive = False  # bytes after the end of the response
        pieces, self._pieces = self._pieces, []
        self._overhead = 0 if pieces else self._overhead + len(data)
        if self._overhead > _MAX_OVERHEAD and not self.is_complete:
            raise BrokenResponse(f"more than {_MAX_OVERHEAD} bytes of a response without a body: {data[:100]!r}")
        return pieces

    def end(self) -> None:
        """Note that the server closed the connection.  Raises BrokenResponse unless this ends the response."""
        if not self.is_complete and (not self.status or self._has_end):
            raise BrokenResponse("the server closed the connection before the end of its answer")
        self.is_complete, self.keeps_alive = True, False

    def on_message_begin(self) -> None:
        """Refuse a response to no request.  See ``httptools.HTTPProtocol``, also for the next four."""
        if self.is_complete:
            raise BrokenResponse("a second response to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note whether the head tells the end of the body."""
        name = name.lower()
        if name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower()):
            self._has_end = True

    def on_headers_complete(self) -> None:
        """Note the status, unless the head is informational (1xx): the response follows it."""
        status = self._parser.get_status_code()
        if status >= 200:
            self.status, self.keeps_alive = status, self._parser.should_keep_alive()

    def on_body(self, piece: bytes) -> None:
        """Keep a piece for ``feed`` to return."""
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """Note the end of the response, unless an informational head ended."""
        self.is_complete = self.status != 0
        if not self.is_complete:
            self._has_end = False  # the informational head's own
