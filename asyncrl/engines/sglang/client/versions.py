"""Lower bounds on a token's weight version, for servers without the plug-in ``stamps``.

Stock SGLang stamps a chunk with the version that its HTTP process knows when the chunk passes it, not with the version
that generated it.  A token generated before an update can therefore carry the version after it, in two cases:

- The chunk was being filled when the update came; hence we use the stamp of the chunk *before*.
- The chunk was still passing through the detokenizer; hence a version counts only ``DETOKENIZER_LAG_S`` after
  it was first seen.

Both rules err towards the older version.
"""

DETOKENIZER_LAG_S = 0.1
"""Longest time in seconds for a chunk to reach the HTTP process, during which an update can overtake it.

On a loaded 2-core machine none of 768 requests was overtaken.  The price: the tokens of 0.1 s, and those of the chunk
being filled, count as older than they are.
"""


class VersionTrail:
    """The times at which each version was first seen in any request to a pool of engines that are updated together."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, float]] = []

    def oldest_possible(self, stamp: int, now: float) -> int:
        """Return the oldest version that can have generated a chunk stamped ``stamp`` that arrived at ``now``."""
        if not self._seen or stamp > self._seen[-1][0]:
            self._seen.append((stamp, now))
        while len(self._seen) > 1 and self._seen[1][1] <= now - DETOKENIZER_LAG_S:
            del self._seen[0]
        return min(stamp, self._seen[0][0])
