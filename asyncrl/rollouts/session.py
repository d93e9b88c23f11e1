"""One open episode: its limits, its token record and its engine calls, for every way in."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from asyncrl.episodes import EpisodeEnd, EpisodeOutcome, EpisodeStart, EpisodeTurns, GeneratedTurn, Trajectory
from asyncrl.errors import EpisodeEnded
from asyncrl.event_loop import loop_time
from asyncrl.rollouts.further_settings import check_further
from asyncrl.rollouts.record import NOTHING_KEPT, TokenIds, TokenRecord, ids_of
from asyncrl.types import Chunk, Reward, SamplingParams, Weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """The limits of each episode of a run."""

    vocabulary_size: int
    """Token ids are below it.  One that is not would end SGLang's scheduler."""
    max_context_len: int
    """Most tokens of a prompt with all turns and observations."""
    max_turns: int | None = None
    end_tokens: tuple[int, ...] = ()
    """Ids of the tokens that end an answer of the model."""
    warned: set[str] = field(default_factory=set, compare=False)
    """Names of the sampling settings that a warning of the run has named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decisions of user code about its episode."""

    rewards: Mapping[int, Reward] = field(default_factory=dict)
    """Reward by conversation; a conversation without one asks the run's reward function."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """Reward of single turns by call."""
    left_out: frozenset[int] = frozenset()
    """Calls whose turns are not trained."""
    end: EpisodeEnd | None = None
    """The reason why the episode ended; None: as its limits tell."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, object] = field(default_factory=dict)
    """Values for rewards, filters and logs, on every sample of the episode."""


class EpisodeSession:
    """An open episode.  Used on the event loop of the controller alone."""

    def __init__(
        self,
        start: EpisodeStart,
        turns: EpisodeTurns,
        limits: EpisodeLimits,
        decode: Callable[[tuple[int, ...]], str],
    ) -> None:
        self.start = start
        self.limits = limits
        self.record = TokenRecord()
        self.end: EpisodeEnd | None = None
        """The limit that the episode met, or the way in which it ended."""
        self.counts: Counter[str] = Counter()
        """Further counts by metric name, which the ways in add to."""
        self._turns = turns
        self._decode = decode
        self._num_calls = 0
        self._began_s = loop_time()
        self._on_engines = _Clock()
        self._is_over = False

    @property
    def weights(self) -> Weights:
        """The weights that the engines serve now."""
        return self._turns.weights

    @property
    def is_over(self) -> bool:
        """Whether the episode takes no more calls."""
        return self._is_over

    @property
    def seconds(self) -> float:
        """Seconds since the episode began."""
        return loop_time() - self._began_s

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        conversation: int = 0,
        reason: str | None = None,
        kept: Mapping[int, int] = NOTHING_KEPT,
        on_chunk: Callable[[Chunk], None] | None = None,
    ) -> GeneratedTurn:
        """Generate one turn behind ``token_ids`` and record it.

        ``token_ids`` are a tuple, or an array, which saves a copy.  Without ``sampling`` the run's settings apply.
        ``conversation``, ``reason`` and ``kept``: see TokenRecord.
        Raises ValueError for token ids that the model lacks and for settings of a wrong type, EpisodeEnded at a limit
        and after the end, and what ``EpisodeTurns.generate`` raises.
        """
        ids = self._checked(token_ids)
        sampling = self._limited(len(ids), sampling or self.start.sampling)
        if sampling.stop_token_ids != self.start.sampling.stop_token_ids:
            self._check_range("stop_token_ids", sampling.stop_token_ids)
            # The engines end an answer at these anyway, unless it has ignore_eos.  They must be known here, or an
            # attempt that was interrupted behind such a token would be continued.
            stops = dict.fromkeys((*self.limits.end_tokens, *sampling.stop_token_ids))
            sampling = replace(sampling, stop_token_ids=tuple(stops))
        if sampling.extra is not self.start.sampling.extra:
            check_further(sampling.extra)
        self._warn_of_temperature(sampling.temperature)
        self._num_calls += 1
        asked = token_ids if isinstance(token_ids, tuple) else tuple(token_ids)
        with self._on_engines:
            known = self.record.known_routes(ids)
            turn = await self._turns.generate(asked, sampling, on_chunk, sum(map(len, known)))
        if self._is_over:
            raise EpisodeEnded(f"{self.start.name}: the episode is over", "cancelled")
        self.record.add(ids, turn, conversation=conversation, reason=reason, kept=kept, known_routes=known)
        return turn

    def outcome(self, verdict: Verdict | None = None) -> EpisodeOutcome:
        """End the episode and return its result.  Raises ValueError if no call was made."""
        verdict = verdict or Verdict()
        self.close(verdict.end or self.end or EpisodeEnd.FINISHED)
        left_out = verdict.left_out
        if verdict.end is EpisodeEnd.TOOL_FAILED:  # also the calls of HTTP clients, which the function does not know
            left_out = frozenset(call for line in self.record.lines for call in line.owned)
        trajectories = self.record.trajectories(
            self._decode,
            seconds=loop_time() - self._began_s,
            rewards=verdict.rewards,
            turn_rewards=verdict.turn_rewards,
            left_out=left_out,
            group_prompt=self.start.prompt.token_ids,
        )
        return self.outcome_of(_with_metadata(trajectories, verdict.metadata), verdict.metrics)

    def outcome_of(
        self, trajectories: tuple[Trajectory, ...], metrics: Mapping[str, float] | None = None
    ) -> EpisodeOutcome:
        """Return the result with these trajectories, which user code made.  Raises ValueError if there are none."""
        if not trajectories:
            raise ValueError("the episode ended without a call of the model")
        counts = {f"episodes/branches/{name}": float(count) for name, count in self.record.branches.items()}
        if self.record.num_dropped:
            counts["episodes/dropped_tokens"] = float(self.record.num_dropped)
        counts |= {name: float(count) for name, count in self.counts.items()}
        return EpisodeOutcome(
            trajectories=trajectories,
            end=self.end or EpisodeEnd.FINISHED,
            tool_s=max(0.0, loop_time() - self._began_s - self._on_engines.total_s),
            metrics={**counts, **(metrics or {})},
        )

    def close(self, end: EpisodeEnd) -> None:
        """Take no more calls.  May be called again; the first reason stays."""
        self._is_over = True
        self.end = self.end or end

    def _checked(self, token_ids: Sequence[int]) -> TokenIds:
        """Return the ids as an array.  Raises ValueError for ids that the model lacks.

        Ids that a recorded line holds were checked when they came, or the model wrote them.
        """
        if not token_ids:
            raise ValueError("token_ids must not be empty")
        try:
            ids = ids_of(token_ids)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"token ids must be integers below 2**31: {error}") from error
        self._check_range("token ids", ids[self.record.num_known(ids) :])
        return ids

    def _check_range(self, name: str, ids: Sequence[int]) -> None:
        """Raise ValueError for ids that the model lacks.

        As token ids they end SGLang's scheduler; so do stop_token_ids, if any request of the batch has min_new_tokens.
        """
        size = self.limits.vocabulary_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            outside = next(each for each in ids if not 0 <= each < size)
            raise ValueError(f"{name} must be 0 to {size - 1}, got {outside}")

    def _warn_of_temperature(self, theirs: float) -> None:
        """Log, once in a run, that a call samples at another temperature than the run.

        Another top-p or top-k needs no warning: the engines return the ids that were kept, and the trainer uses them.
        """
        ours, warned = self.start.sampling.temperature, self.limits.warned
        if theirs == ours or self.start.data_set is not None or "temperature" in warned:
            return
        warned.add("temperature")
        logger.warning(
            "%s: a call samples with temperature %s, the run with %s: the trainer computes log-probs with the run's, "
            "so ratios and train/logprob_diff contain the difference",
            self.start.name,
            theirs,
            ours,
        )

    def _limited(self, num_tokens: int, sampling: SamplingParams) -> SamplingParams:
        """Return the settings with a length that fits behind ``num_tokens``.  Raises EpisodeEnded.

        SGLang refuses a minimum length above the maximum, which would cost the group.
        """
        name, limits = self.start.name, self.limits
        if self._is_over:
            raise EpisodeEnded(f"{name}: the episode is over", "over")
        if limits.max_turns is not None and self._num_calls >= limits.max_turns:
            self.end = EpisodeEnd.MAX_TURNS
            raise EpisodeEnded(f"{name}: {self._num_calls} turns, max-turns is {limits.max_turns}", "max_turns")
        room = limits.max_context_len - num_tokens
        if room < 1:
            self.end = EpisodeEnd.CONTEXT_FULL
            raise EpisodeEnded(
                f"{name}: {num_tokens} tokens, which is the maximum context length "
                f"{limits.max_context_len} (rollout-max-context-len) or more",
                "context_full",
            )
        most = min(sampling.max_new_tokens, room)
        least = min(sampling.min_new_tokens, most)
        if (most, least) == (sampling.max_new_tokens, sampling.min_new_tokens):
            return sampling
        return replace(sampling, max_new_tokens=most, min_new_tokens=least)


def _with_metadata(trajectories: tuple[Trajectory, ...], metadata: Mapping[str, object]) -> tuple[Trajectory, ...]:
    if not metadata:
        return trajectories
    return tuple(replace(each, sample=replace(each.sample, metadata=metadata)) for each in trajectories)


class _Clock:
    """Seconds during which at least one block was open."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._open = 0
        self._since_s = 0.0

    def __enter__(self) -> None:
        if self._open == 0:
            self._since_s = loop_time()
        self._open += 1

    def __exit__(self, *failure: object) -> None:
        self._open -= 1
        if self._open == 0:
            self.total_s += loop_time() - self._since_s
