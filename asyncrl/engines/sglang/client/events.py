"""Server-sent events, parsed from a byte stream.  Their payloads are not interpreted."""


class EventReader:
    """Collects the payloads of ``data:`` lines of any length, however the stream is cut into pieces."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the payloads that ``piece`` completes, in order."""
        if not self._rest and piece.find(b"\n") == len(piece) - 2 and piece.endswith(b"\n\n"):
            return _payloads([piece[:-2]])  # one whole event, as servers write them
        first, *others = piece.split(b"\n")
        self._rest.append(first)
        if not others:
            return []
        lines = [b"".join(self._rest), *others[:-1]]
        self._rest = [others[-1]] if others[-1] else []
        return _payloads(lines)


def _payloads(lines: list[bytes]) -> list[bytes]:
    return [line[5:].strip() for line in lines if line.startswith(b"data:")]
