"""What engines, trainer and updates take, and what would be the best that any schedule could make of them."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from asyncrl.sim.model.lengths import Moments


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """One rollout engine.  A decode step gives every running request one token.

    The defaults are those of a dense model of 32 billion parameters in bfloat16 on one H200 (4.8 TB/s, 141 GB),
    estimated from the data sheet, not measured: calibrate for your own.
    """

    fixed_s: float = 0.016
    """Of a decode step: reading 64 GB of weights at 4.8 TB/s takes 13.3 ms, launches and sampling the rest."""
    per_request_s: float = 0.00002
    """More for every running request: sampling and book-keeping.  Its arithmetic hides behind reading the weights until
    some 200 requests run (64 GFLOP each, at 990 TFLOP/s)."""
    per_context_token_s: float = 60e-9
    """More for every token of context: 256 KiB of KV cache (64 layers, 8 heads of 128) at nine tenths of 4.8 TB/s."""
    prefill_tokens_per_s: float = 8000.0
    """Prefill goes before decoding: 64 GFLOP per token at 510 TFLOP/s."""
    kv_tokens: int = 220_000
    """Capacity: 58 GB, what weights and activations leave, at 256 KiB a token."""
    max_running: int = 16
    """Requests decoded at once, the engine's full batch: so many answers of 13,750 tokens fill the KV cache."""
    latency_s: float = 0.0
    """From the request to its first step, besides prefill; costs the engine nothing."""
    per_longest_token_s: float = 0.0
    """More for every token of the longest context: an attention kernel is done when its longest request is."""
    prefill_fixed_s: float = 0.0
    """Of a prefill, however many requests come at once: launching its kernels."""
    by_running: tuple[tuple[float, float], ...] = ()
    """(requests, seconds of a decode step), in order; takes the place of ``fixed_s`` and ``per_request_s``.  Linear in
    between, level before the first, and beyond the last as between the last two.  A mixture of experts needs it: few
    requests touch few experts, many touch all of them."""

    def __post_init__(self) -> None:
        points = tuple((float(running), float(seconds)) for running, seconds in self.by_running)
        if any(after[0] <= before[0] for before, after in pairwise(points)):
            raise ValueError(f"engine.by_running must have growing numbers of requests, got {points}")
        object.__setattr__(self, "by_running", points)

    def step_s(self, running: float, context: float, longest: float = 0.0) -> float:
        """Seconds of a decode step for ``running`` requests with ``context`` tokens between them, the longest with
        ``longest``."""
        alone = self._level_s(running) if self.by_running else self.fixed_s + self.per_request_s * running
        return alone + self.per_context_token_s * context + self.per_longest_token_s * longest

    def full_rate(self, moments: Moments, prompt_tokens: int) -> float:
        """Tokens per second of an engine with a full batch of answers of all ages, their prompts' prefill included.

        The longest of so many is taken to be as long as answers get, half written.
        """
        context = self.max_running * (prompt_tokens + moments.mean_running)
        decoding = self.step_s(self.max_running, context, prompt_tokens + moments.longest / 2) / self.max_running
        prefill = prompt_tokens / self.prefill_tokens_per_s + self.prefill_fixed_s
        return 1 / (decoding + prefill / moments.mean)

    def _level_s(self, running: float) -> float:
        points = self.by_running
        if running <= points[0][0] or len(points) == 1:
            return points[0][1]
        place = min(bisect_right(points, (running,)), len(points) - 1)
        (before, low), (after, high) = points[place - 1], points[place]
        return low + (high - low) * (running - before) / (after - before)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCosts:
    """The trainer."""

    fixed_s: float = 0.0
    """Of a step, whatever its size: part of the rate unless it is known."""
    tokens_per_s_per_gpu: float = 1000.0
    """Prompts count as well."""

    def step_s(self, tokens: int, gpus: int) -> float:
        """Seconds of a step over ``tokens`` on ``gpus``."""
        return self.fixed_s + tokens / self.tokens_per_s_per_gpu / gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCosts:
    """A weight update."""

    pause_s: float = 1.3
    """Generation stands still: 64 GB to every engine over 400 Gbit/s InfiniBand."""
    take_s: float = 0.0
    """The trainer copies its weights before it goes on; only then are they sent."""
    holds_trainer: bool = False
    """Whether training also waits for the pause to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How much engine and trainer slow each other down where they share processors, as they do on a CPU; 1 is not at
    all."""

    engine: float = 1.0
    """Seconds that the engines need for one second of work while the trainer works."""
    trainer: float = 1.0
    """Likewise for the trainer while engines work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """How engines die."""

    mean_s: float | None = None
    """Between the losses of one engine; None: never."""
    restart_s: float = 60.0
    """Until it is back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """All of it."""

    engine: EngineCosts = EngineCosts()
    trainer: TrainerCosts = TrainerCosts()
    update: UpdateCosts = UpdateCosts()
    sharing: Sharing = Sharing()
    failures: Failures = Failures()
    step_overhead_s: float = 0.0
    """Of the controller between two steps, in which the trainer waits."""

    def ideal_rate(self, moments: Moments, prompt_tokens: int, gpus: int, gpus_per_engine: int) -> float:
        """Generated and trained tokens per second if no GPU ever waited and every engine were always full.

        A token needs so many GPU-seconds of an engine with a full batch and so many of the trainer; the GPUs are
        divided between the two as it takes.  Pauses and the trainer's fixed time are no part of it: they are losses.
        """
        rollout = gpus_per_engine / self.engine.full_rate(moments, prompt_tokens)
        training = (1 + prompt_tokens / moments.mean) / self.trainer.tokens_per_s_per_gpu
        return gpus / (rollout + training)


def balanced_trainer(
    costs: EngineCosts, moments: Moments, prompt_tokens: int, *, rollout_gpus: int, gpus_per_engine: int, gpus: int
) -> float:
    """Tokens per second and GPU at which the trainer keeps up with full engines when ``rollout_gpus`` of ``gpus`` roll
    out."""
    generated = costs.full_rate(moments, prompt_tokens) * rollout_gpus / gpus_per_engine
    return generated * (1 + prompt_tokens / moments.mean) / (gpus - rollout_gpus)
