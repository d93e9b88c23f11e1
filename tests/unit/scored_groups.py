"""Hand-made scored groups."""

from array import array
from collections.abc import Sequence

from asyncrl.types import FinishReason, GroupId, Prompt, Sample, ScoredGroup, ScoredSample, Span, Weights


def group(
    group_id: int,
    rewards: Sequence[float],
    lengths: Sequence[int] | None = None,
    *,
    texts: Sequence[str] | None = None,
    label: str | None = None,
    num_cut: int = 0,
    step: int = 0,
) -> ScoredGroup:
    """A group of answers of ``lengths`` tokens (1 by default), under weights of ``step``; ``num_cut`` are cut."""
    lengths = lengths or (1,) * len(rewards)
    weights = Weights(version=step, step=step)
    samples = [
        Sample(
            index=index,
            group_id=GroupId(group_id),
            token_ids=(7,) * length,
            logprobs=array("f", [-1.0]) * length,
            spans=(Span(weights=weights, start=0, stop=length),) if length else (),
            text=texts[index] if texts else "",
            finish=FinishReason.LENGTH if index < num_cut else FinishReason.STOP,
            seconds=1.0,
        )
        for index, length in enumerate(lengths)
    ]
    return ScoredGroup(
        group_id=GroupId(group_id),
        prompt=Prompt(row=group_id, epoch=0, text="", token_ids=(1,), label=label),
        dispatched=weights,
        samples=tuple(
            ScoredSample(sample=sample, reward=reward, loss_mask=(1,) * len(sample.token_ids))
            for sample, reward in zip(samples, rewards, strict=True)
        ),
    )
