"""The engine with the fewest requests among a thousand, found without looking at all of them."""

import heapq


class LeastLoaded:
    """Request counts by engine number."""

    def __init__(self, size: int) -> None:
        self.counts = [0] * size
        self._up = [True] * size
        self._heap = [(0, number) for number in range(size)]

    def pick(self) -> int | None:
        """Count one more request on the engine with the fewest and return its number; None if every engine is down."""
        while self._heap:
            count, number = self._heap[0]
            if self._up[number] and count == self.counts[number]:
                self.counts[number] += 1
                heapq.heapreplace(self._heap, (self.counts[number], number))
                return number
            heapq.heappop(self._heap)
        return None

    def release(self, number: int) -> None:
        """Count one request less."""
        self.counts[number] -= 1
        if self._up[number]:
            heapq.heappush(self._heap, (self.counts[number], number))

    def take_down(self, number: int) -> None:
        """Send the engine no more requests."""
        self._up[number] = False

    def bring_up(self, number: int) -> None:
        """Send the engine requests again."""
        self._up[number] = True
        heapq.heappush(self._heap, (self.counts[number], number))
