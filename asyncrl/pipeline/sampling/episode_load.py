"""The load of episodes on the engines: how many slots the open episodes are expected to hold.

An episode holds a slot during its turns, and none while its tools run.  Admission counts each open episode with the
share of its time in which it holds a slot, so that slow tools do not leave engines idle:

    share = time that episodes hold slots / (time that they are open - time that they wait for a slot or are parked)

Of n episodes, each on an engine with probability p = share, the number on engines has the variance n p (1 - p).  For
n p = ``limit`` slots this is limit (1 - p).  DEVIATIONS standard deviations more are admitted, so that a slot seldom
stays free; the surplus waits for a slot.
"""

import math

from asyncrl.event_loop import loop_time

WINDOW = 256
"""Number of recent episodes in the measured share, which has an error of some percent then."""
DEVIATIONS = 2.0
"""Standard deviations above the mean.  At two, 0.8 % of one deviation of the slots are free on average (Gaussian loss
integral): of 64 slots with a share of one half, 0.05 slots."""


class EpisodeLoad:
    """The open episodes, and the measured share of time that one holds a slot.  All methods take constant time."""

    def __init__(self, max_open: int) -> None:
        """Allow ``max_open`` open episodes at once."""
        self.max_open = max_open
        self.num_open = 0
        self.num_active = 0
        """Open episodes that neither wait for a slot nor are parked."""
        self.num_held = 0
        """Slots that episodes hold."""
        self._active_s = 0.0
        self._held_s = 0.0
        self._since = 0.0

    def open(self) -> None:
        """Count an episode that was admitted."""
        self.num_open += 1

    def close(self) -> None:
        """Count an episode as ended.  Older ones lose a little weight."""
        self.num_open -= 1
        self._advance()
        self._active_s *= 1 - 1 / WINDOW
        self._held_s *= 1 - 1 / WINDOW

    def change(self, *, active: int, held: int) -> None:
        """Change the number of episodes that neither wait nor are parked, and the number of slots that they hold."""
        self._advance()
        self.num_active += active
        self.num_held += held

    @property
    def share(self) -> float:
        """Slots that an episode holds on average while it neither waits nor is parked; 1 before any time passed."""
        self._advance()
        return self._held_s / self._active_s if self._active_s > 0 else 1.0

    def free(self, limit: int, claimed: int) -> int:
        """Return the slots of ``limit`` that ``claimed`` episodes are not expected to hold, at least 0."""
        share = self.share
        headroom = DEVIATIONS * math.sqrt(limit * max(0.0, 1.0 - share))
        return max(0, math.ceil(limit + headroom - claimed * share))

    def has_room(self, num_episodes: int) -> bool:
        """Return whether this many more episodes may be open; a first group may always start."""
        return self.num_open == 0 or self.num_open + num_episodes <= self.max_open

    def _advance(self) -> None:
        now = loop_time()
        self._active_s += self.num_active * (now - self._since)
        self._held_s += self.num_held * (now - self._since)
        self._since = now
