"""Server-sent events, cut out of a byte stream.  Knows nothing of what they mean."""


class EventReader:
    """Collects the payloads of ``data:`` lines, however the stream is cut into pieces and however long a line is."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The payloads that ``piece`` completes, in order."""
        first, *others = piece.split(b"\n")
        self._rest.append(first)
        if not others:
            return []
        lines = [b"".join(self._rest), *others[:-1]]
        self._rest = [others[-1]]
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
