"""The settings of episodes."""

from dataclasses import dataclass

from asyncrl.episodes import EpisodeFn


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """The function that generates the samples, and the limits on it."""

    function: EpisodeFn
    timeout_s: float = 3600.0
    """Seconds for one episode, without the time in which its group is interrupted."""
    key: str = ""
    """Prefix of the episodes' names, unique among the processes of a run: a resumed run uses group ids again."""
