"""Time that engines, trainer and weight updates need, and the ideal throughput that no schedule can exceed."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from asyncrl.sim.model.lengths import Moments


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """The times of one rollout engine.  A decode step gives every running request one token.

    The defaults describe a dense model of 32 billion parameters in bfloat16 on one H200 (4.8 TB/s, 141 GB).  They are
    estimates from the data sheet, not measurements: calibrate on your own hardware.
    """

    fixed_s: float = 0.016
    """Seconds of a decode step, whatever the batch: 13.3 ms read 64 GB of weights at 4.8 TB/s; kernel launches and
    sampling take the rest."""
    per_request_s: float = 0.00002
    """Seconds added to a decode step per running request: sampling and bookkeeping.  The request's arithmetic (64 GFLOP
    at 990 TFLOP/s) is hidden behind the reading of the weights up to some 200 requests."""
    per_context_token_s: float = 60e-9
    """Seconds per token of context: 256 KiB of KV cache (64 layers, 8 KV heads of 128) at nine tenths of 4.8 TB/s."""
    prefill_tokens_per_s: float = 8000.0
    """Tokens prefilled per second; prefill precedes decoding.  64 GFLOP per token at 510 TFLOP/s."""
    kv_tokens: int = 220_000
    """Capacity of the KV cache in tokens: the 58 GB that weights and activations leave, at 256 KiB per token."""
    max_running: int = 16
    """Most requests decoded at once: 16 answers of 13,750 tokens fill the KV cache."""
    latency_s: float = 0.0
    """Seconds from the request to its first decode step, prefill excluded.  The engine is not busy meanwhile."""
    per_longest_token_s: float = 0.0
    """Seconds per token of the longest context: an attention kernel ends with its longest request."""
    prefill_fixed_s: float = 0.0
    """Seconds per prefill, however many requests it serves: kernel launches."""
    by_running: tuple[tuple[float, float], ...] = ()
    """Pairs (requests, seconds of a decode step) in ascending order; they replace ``fixed_s`` and ``per_request_s``.
    Interpolated linearly, constant before the first, extrapolated from the last two.  A mixture of experts needs them:
    few requests touch few experts, many touch all of them."""

    def __post_init__(self) -> None:
        points = tuple((float(running), float(seconds)) for running, seconds in self.by_running)
        if any(after[0] <= before[0] for before, after in pairwise(points)):
            raise ValueError(f"engine.by_running must have growing numbers of requests, got {points}")
        object.__setattr__(self, "by_running", points)

    def step_s(self, running: float, context: float, longest: float = 0.0) -> float:
        """Seconds of a decode step for ``running`` requests with ``context`` tokens in total.

        ``longest`` is the largest number of tokens in one of them.
        """
        alone = self._level_s(running) if self.by_running else self.fixed_s + self.per_request_s * running
        return alone + self.per_context_token_s * context + self.per_longest_token_s * longest

    def full_rate(self, moments: Moments, prompt_tokens: int) -> float:
        """Tokens per second of an engine with a full batch of answers of all ages, prefill of their prompts included.

        Assumes that the longest request in the batch is half way through the longest possible answer.
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
    """The times of the trainer."""

    fixed_s: float = 0.0
    """Seconds per step, whatever its size.  0 if unknown: the rate then includes them."""
    tokens_per_s_per_gpu: float = 1000.0
    """Tokens trained per second and GPU, prompts included."""

    def step_s(self, tokens: int, gpus: int) -> float:
        """Seconds of a step over ``tokens`` tokens on ``gpus`` GPUs."""
        return self.fixed_s + tokens / self.tokens_per_s_per_gpu / gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCosts:
    """The times of a weight update."""

    pause_s: float = 1.3
    """Seconds without generation: 64 GB to every engine over 400 Gbit/s InfiniBand."""
    take_s: float = 0.0
    """Seconds of the snapshot, during which the trainer waits; the weights are sent afterwards."""
    holds_trainer: bool = False
    """Whether training also waits until the pause ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The slowdown of engines and trainer where they share processors, as on a CPU.  A factor of 1 means none."""

    engine: float = 1.0
    """Seconds that the engines need for one second of work while the trainer works."""
    trainer: float = 1.0
    """Seconds that the trainer needs for one second of work while engines work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """The rate at which engines fail."""

    mean_s: float | None = None
    """Mean seconds between failures of one engine; None: engines never fail."""
    restart_s: float = 60.0
    """Seconds until a failed engine is back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The times of the whole system."""

    engine: EngineCosts = EngineCosts()
    trainer: TrainerCosts = TrainerCosts()
    update: UpdateCosts = UpdateCosts()
    sharing: Sharing = Sharing()
    failures: Failures = Failures()
    step_overhead_s: float = 0.0
    """Seconds that the driver takes between two steps, in which the trainer waits."""

    def ideal_rate(self, moments: Moments, prompt_tokens: int, gpus: int, gpus_per_engine: int) -> float:
        """Tokens per second, generated and trained, if no GPU ever waited and every engine were always full.

        A token needs GPU-seconds of an engine with a full batch and GPU-seconds of the trainer; the GPUs are divided
        between the two in that proportion.  Pauses and the trainer's fixed time count as losses, so they are left out.
        """
        rollout = gpus_per_engine / self.engine.full_rate(moments, prompt_tokens)
        training = (1 + prompt_tokens / moments.mean) / self.trainer.tokens_per_s_per_gpu
        return gpus / (rollout + training)


def balanced_trainer(
    costs: EngineCosts, moments: Moments, prompt_tokens: int, *, rollout_gpus: int, gpus_per_engine: int, gpus: int
) -> float:
    """Tokens per second and GPU at which the trainer keeps up with ``rollout_gpus`` GPUs of full engines, out of
    ``gpus`` GPUs in total."""
    generated = costs.full_rate(moments, prompt_tokens) * rollout_gpus / gpus_per_engine
    return generated * (1 + prompt_tokens / moments.mean) / (gpus - rollout_gpus)
