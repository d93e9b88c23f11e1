"""Which weights can have made a token, given that SGLang stamps chunks late; for servers without ``stamps``.

SGLang stamps a chunk with the version its HTTP process knows when the chunk passes by, not with the one that made it.
Tokens made before an update can so be stamped as made after it, in two ways: the chunk was being filled when the update
came (hence we take the stamp of the chunk *before*), or it was still on its way through the detokenizer (hence a
version counts only once it has been seen for ``SETTLE_S``).  Both err towards the older version.
"""

SETTLE_S = 0.1
"""Longest way of a chunk to the HTTP process that an update can overtake.  Not one of 768 requests was overtaken on a
loaded 2-core machine; the price is that the tokens of 0.1 s, and those of the chunk being filled, count as older."""


class VersionTrail:
    """When each version was first seen, over all requests to a pool of engines that are updated together."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, float]] = []

    def oldest_possible(self, stamp: int, now: float) -> int:
        """The oldest version that can have been at work when a chunk stamped ``stamp`` was made, at ``now``."""
        if not self._seen or stamp > self._seen[-1][0]:
            self._seen.append((stamp, now))
        while len(self._seen) > 1 and self._seen[1][1] <= now - SETTLE_S:
            del self._seen[0]
        return min(stamp, self._seen[0][0])
