"""Decoding speed of the engines, from start and end of their answers: least squares over the answers of one run.

An answer of L tokens took about

    sum over its L steps of (fixed + per_request · b + per_expert · touched(b) + per_context_token · c
                             + per_longest_token · l)
    + prefill_fixed · (prefills meanwhile) + prompt / prefill_rate · (requests prefilled meanwhile)

seconds, pauses excluded: b requests with c tokens of context on its engine, l of them the longest request's, and
``touched(b)`` experts of each layer in use.  The times of an answer's tokens, and so their surroundings, depend on the
coefficients: the fit starts from an equal pace and is repeated a few times.  The timeline does not record which engine
had an answer.  That follows from the rule that chooses one: the engine with the fewest requests, the first of equals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from asyncrl.errors import DataError
from asyncrl.sim.calibration.measured import MeasuredSample
from asyncrl.sim.calibration.squares import Floats, not_negative
from asyncrl.sim.model.costs import EngineCosts
from asyncrl.sim.model.least_loaded import LeastLoaded

_ROUNDS = 10
"""Rounds of averaging and fitting; the coefficients then change by less than 1 %."""
_START_S = 0.005
"""Seconds of a decode step in the first round; any number will do."""
_FINE_S = 0.25
"""Longest slice of time in seconds.  Contexts grow by some 60 tokens meanwhile and count as constant within it."""
_TOGETHER_S = 0.015
"""Requests that start within this many seconds of each other share a prefill: one prefill takes about as long."""
_SHORT_S = 0.2
"""Residuals are weighted by 1 / sqrt(seconds); shorter answers than this have its weight."""
_ENOUGH = 50
"""Least number of answers.  There are at most seven coefficients, and answers of one group resemble each other."""
_AT = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
"""Numbers of requests at which the table of a mixture of experts has a row; more requests touch all experts."""
_UNLIMITED = 10**9

type Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of each layer of a mixture of experts."""

    num: int
    per_token: int

    def touched(self, running: Floats) -> Floats:
        """The expected number of experts in use when ``running`` requests choose theirs independently of each other."""
        used: Floats = self.num * (1 - (1 - self.per_token / self.num) ** running)
        return used


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The fitted costs and their error."""

    costs: EngineCosts
    num_answers: int
    error: float
    """Mean absolute residual, as a share of the mean time of an answer."""


def fit_pace(
    samples: Sequence[MeasuredSample],
    pauses: Sequence[Span],
    *,
    num_engines: int,
    prompt_tokens: int,
    experts: Experts | None,
    until_s: float,
) -> Pace:
    """Fit to the finished ``samples`` of one run, whose engines stood still during ``pauses``.

    ``until_s`` is the time when the run was ended.  Answers unfinished by then are not among ``samples``, so answers
    that ran together with them are left out.  Raises DataError when too few are left.
    """
    longest_s = max((each.stop_s - each.start_s for each in samples), default=0.0)
    engines = [_Engine(mine, pauses, prompt_tokens) for mine in _by_engine(samples, num_engines)]
    known = [engine.stops <= until_s - longest_s for engine in engines]
    if sum(int(each.sum()) for each in known) < _ENOUGH:
        raise DataError(
            f"fewer than {_ENOUGH} answers ended {longest_s:.0f} s before the end of the run: measure a longer run"
        )
    seconds = np.concatenate([engine.seconds[use] for engine, use in zip(engines, known, strict=True)])
    weights = 1 / np.sqrt(np.maximum(seconds, _SHORT_S))
    found, columns = np.array([_START_S]), np.empty((0, 0))
    for _ in range(_ROUNDS):
        parts = [engine.columns(found, experts)[use] for engine, use in zip(engines, known, strict=True)]
        columns = np.concatenate(parts)
        found = not_negative(columns * weights[:, None], seconds * weights)
    error = float(np.mean(np.abs(columns @ found - seconds)) / np.mean(seconds))
    return Pace(costs=_costs(found, experts), num_answers=len(seconds), error=error)


def _costs(found: Floats, experts: Experts | None) -> EngineCosts:
    fixed, request, context, longest, expert, prefill_fixed, prefill = (float(each) for each in found)
    at = np.array(_AT, dtype=float)
    levels = fixed + request * at + (expert * experts.touched(at) if experts else 0.0)
    return EngineCosts(
        fixed_s=fixed,
        per_request_s=request,
        by_running=tuple(zip(_AT, levels.tolist(), strict=True)) if experts else (),
        per_context_token_s=context,
        per_longest_token_s=longest,
        prefill_fixed_s=prefill_fixed,
        prefill_tokens_per_s=1 / max(prefill, 1 / _UNLIMITED),
        kv_tokens=_UNLIMITED,
        max_running=_UNLIMITED,
    )


def _by_engine(samples: Sequence[MeasuredSample], num_engines: int) -> list[list[MeasuredSample]]:
    """The samples of each engine by the rule that chooses engines.  At equal times, ends precede starts."""
    starts = [(each.start_s, 1, each.group or 0, each.index, place) for place, each in enumerate(samples)]
    stops = [(each.stop_s, 0, each.group or 0, each.index, place) for place, each in enumerate(samples)]
    loads, engine_of = LeastLoaded(num_engines), dict[int, int]()
    mine: list[list[MeasuredSample]] = [[] for _ in range(num_engines)]
    for _, begins, _, _, place in sorted(starts + stops):
        if begins:
            number = loads.pick()
            if number is None:
                raise AssertionError("no engine was taken down")
            engine_of[place] = number
            mine[number].append(samples[place])
        elif place in engine_of:
            loads.release(engine_of[place])
    return [each for each in mine if each]


class _Engine:
    """The answers of one engine, and its time in slices in which no request starts or ends and no pause does."""

    def __init__(self, samples: Sequence[MeasuredSample], pauses: Sequence[Span], prompt_tokens: int) -> None:
        self.starts, self.stops = (
            np.array([getattr(each, name) for each in samples]) for name in ("start_s", "stop_s")
        )
        self._tokens = np.array([float(each.tokens) for each in samples])
        self._prompt = prompt_tokens
        edges = np.unique(np.concatenate([self.starts, self.stops, np.array(pauses).ravel()]))
        self._edges = _refined(edges[(edges >= self.starts.min()) & (edges <= self.stops.max())])
        self._middles = (self._edges[1:] + self._edges[:-1]) / 2
        self._running = _count(self._middles, self.starts, self.stops)
        held = [np.array(each) for each in zip(*pauses, strict=True)] or [np.empty(0), np.empty(0)]
        self._active_s = np.where(_count(self._middles, *held) > 0, 0.0, np.diff(self._edges))
        self._oldest = self._find_oldest()
        self._progress, self._stretch = np.zeros(len(self._edges)), np.ones(len(samples))
        self.seconds = self._during(self._active_s)

    def columns(self, found: Floats, experts: Experts | None) -> Floats:
        """One row for each answer, one column for each coefficient, in the order of ``_costs``.

        ``found`` is an earlier estimate, or only the seconds of a step.
        """
        pace = np.full(len(self._middles), found[0])
        if len(found) > 1:
            before = self._surroundings(self._progress, self._stretch, experts)
            pace = np.maximum(before @ found[: before.shape[1]], 1 / _UNLIMITED)
        steps = self._active_s / pace
        self._progress = np.concatenate([[0.0], np.cumsum(steps)])
        self._stretch = self._tokens / np.maximum(self._during(steps), 1.0)
        around = self._surroundings(self._progress, self._stretch, experts)
        per_answer = np.stack([self._during(steps * each) for each in around.T], axis=1) * self._stretch[:, None]
        return np.concatenate([per_answer, self._prefills()], axis=1)

    def _surroundings(self, progress: Floats, stretch: Floats, experts: Experts | None) -> Floats:
        """For each slice: 1, requests, context, longest context, experts.

        An answer has ``stretch`` times the ``progress`` since its start in tokens: exactly its own number at its end.
        """
        begun = np.interp(self.starts, self._edges, progress)
        now = np.interp(self._middles, self._edges, progress)
        slopes = _count(self._middles, self.starts, self.stops, stretch)
        offsets = _count(self._middles, self.starts, self.stops, stretch * begun)
        written = np.maximum(slopes * now - offsets, 0.0)
        longest = np.maximum((now - begun[self._oldest]) * stretch[self._oldest], 0.0) + self._prompt
        return np.stack(
            [
                np.ones(len(now)),
                self._running,
                written + self._running * self._prompt,
                np.where(self._running > 0, longest, 0.0),
                experts.touched(self._running) if experts else np.zeros(len(now)),
            ],
            axis=1,
        )

    def _during(self, amounts: Floats) -> Floats:
        """The part of ``amounts``, one for each slice, that falls into each answer's time."""
        area = np.concatenate([[0.0], np.cumsum(amounts)])
        inside: Floats = np.interp(self.stops, self._edges, area) - np.interp(self.starts, self._edges, area)
        return inside

    def _prefills(self) -> Floats:
        """Prefills during each answer, its own included, and the prompt tokens in them."""
        begun = np.sort(self.starts)
        heads = begun[np.concatenate([[True], np.diff(begun) > _TOGETHER_S])]
        prefills = np.searchsorted(heads, self.stops) - np.searchsorted(heads, self.starts - _TOGETHER_S)
        requests = np.searchsorted(begun, self.stops) - np.searchsorted(begun, self.starts - _TOGETHER_S)
        return np.stack([prefills, requests * float(self._prompt)], axis=1)

    def _find_oldest(self) -> npt.NDArray[np.intp]:
        """For each slice, the running answer that started first: its context is the longest."""
        order, oldest, place = np.argsort(self.starts, kind="stable"), np.zeros(len(self._middles), dtype=int), 0
        for number, middle in enumerate(self._middles):
            while place < len(order) - 1 and self.stops[order[place]] < middle:
                place += 1
            oldest[number] = order[place]
        return oldest


def _refined(edges: Floats) -> Floats:
    """``edges`` with others in between, so that no slice is longer than ``_FINE_S``."""
    parts = [np.linspace(a, b, max(1, int(np.ceil((b - a) / _FINE_S))), endpoint=False) for a, b in pairwise(edges)]
    return np.concatenate([*parts, edges[-1:]])


def _count(at: Floats, starts: Floats, stops: Floats, weights: Floats | None = None) -> Floats:
    """The number of spans open at each moment, or the sum of their weights."""
    weights = np.ones(len(starts)) if weights is None else weights
    return _sum_until(at, starts, weights) - _sum_until(at, stops, weights)


def _sum_until(at: Floats, times: Floats, weights: Floats) -> Floats:
    """The sum of the weights of all ``times`` up to each moment."""
    order = np.argsort(times)
    total: Floats = np.concatenate([[0.0], np.cumsum(weights[order])])
    return total[np.searchsorted(times[order], at, "right")]
