"""Random routes, which no router would choose."""

from dataclasses import replace

import numpy as np

from asyncrl.models.shape import ModelShape
from asyncrl.token_columns import Routes
from asyncrl.types import Batch, ScoredGroup, ScoredSample, Span, Weights

MIXTURES = ("qwen3-moe", "glm4.5", "glm4.5-air", "glm4.7-flash", "deepseek-v3", "moonlight")
"""The families of ``families.TINY`` with experts."""


def random_routes(
    shape: ModelShape, num_positions: int, rng: np.random.Generator, missing: tuple[tuple[int, int], ...] = ()
) -> Routes:
    """Distinct experts at every position.  Missing rows have the same expert K times, and no router may use it."""
    assert shape.experts is not None
    num_layers = shape.num_layers - shape.experts.num_dense_layers
    order = rng.random((num_positions, num_layers, shape.experts.num_experts)).argsort(-1)
    experts = order[..., : shape.experts.num_chosen].astype(np.uint8)
    for start, stop in missing:
        experts[start:stop] = 255
    return Routes(experts_NLK=experts, missing=missing)


def aged(batch: Batch) -> Batch:
    """The batch, whose answers begin with tokens of older weights: those of even index two steps, others one step."""

    def with_lag(scored: ScoredSample) -> ScoredSample:
        sample, half = scored.sample, len(scored.sample.token_ids) // 2
        old = batch.step - 1 - (sample.index % 2 == 0)
        parts = ((old, 0, half), (batch.step, half, len(sample.token_ids)))
        spans = tuple(
            Span(weights=Weights(version=step, step=step), start=start, stop=stop)
            for step, start, stop in parts
            if start < stop
        )
        return replace(scored, sample=replace(sample, spans=spans))

    return replace(
        batch,
        groups=tuple(replace(group, samples=tuple(map(with_lag, group.samples))) for group in batch.groups),
    )


def routed(batch: Batch, shape: ModelShape, *, seed: int, share_missing: float = 0.0) -> Batch:
    """The batch with random routes of all samples.

    With ``share_missing`` above 0, some samples have none, and others lack this share in one or two ranges.
    """
    rng = np.random.default_rng(seed)

    def with_routes(group: ScoredGroup, scored: ScoredSample) -> ScoredSample:
        prompt = group.prompt.token_ids if scored.sample.prompt_ids is None else scored.sample.prompt_ids
        num_positions = len(prompt) + len(scored.sample.token_ids) - 1
        if rng.random() < share_missing / 2:
            return scored
        num_missing = int(share_missing * num_positions)
        start = int(rng.integers(num_positions - num_missing + 1))
        missing = ((start, start + num_missing),) if num_missing else ()
        routes = random_routes(shape, num_positions, rng, missing)
        return replace(scored, sample=replace(scored.sample, routes=routes))

    return replace(
        batch,
        groups=tuple(
            replace(group, samples=tuple(with_routes(group, each) for each in group.samples)) for group in batch.groups
        ),
    )
