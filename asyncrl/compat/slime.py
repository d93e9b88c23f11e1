"""What slime's plug-ins expect to be handed: its ``Sample`` and its ``args``."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

from asyncrl.types import FinishReason, GroupId, Prompt, ScoredGroup
from asyncrl.types import Sample as OurSample

SlimeArgs = SimpleNamespace
"""Every flag of the run by its name with underscores: ``SlimeArgs(**config.flat(run))``."""


class SlimeStatus(enum.Enum):
    """slime's names of how a sample ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class Sample:
    """slime's view of one answer.  A copy: what a plug-in writes to it is lost."""

    Status: ClassVar[type[SlimeStatus]] = SlimeStatus

    group_index: int
    """Row of the prompt in its file."""
    index: int
    """Place in its group."""
    prompt: str
    tokens: list[int]
    """Prompt and answer."""
    response: str
    response_length: int
    """Tokens of the answer."""
    label: str | None
    reward: float | None
    """None until it is scored."""
    loss_mask: list[int]
    weight_versions: list[str]
    """One per set of weights that wrote some of it, in order."""
    rollout_log_probs: list[float]
    status: SlimeStatus
    metadata: dict[str, Any] = field(default_factory=dict)
    group_id: GroupId | None = None
    """Ours: which group it belongs to, None before there is one.  ``group_index`` comes again every epoch."""

    def get_reward_value(self, args: SlimeArgs) -> float | None:
        """The reward, as slime's own filters ask for it."""
        return self.reward


@dataclass(slots=True)
class DynamicFilterOutput:
    """slime's verdict of a filter; may be changed after it was made, as slime's own filters do."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
    """No effect.  In slime it keeps a rejected group whose loss would start another wave of sampling; here a rejected
    group is replaced by one group, so there are no waves."""


def to_slime(prompt: Prompt, sample: OurSample, reward: float | None, loss_mask: Sequence[int]) -> Sample:
    """One answer in slime's terms."""
    return Sample(
        group_index=prompt.row,
        index=sample.index,
        prompt=prompt.text,
        tokens=[*prompt.token_ids, *sample.token_ids],
        response=sample.text,
        response_length=len(sample.token_ids),
        label=prompt.label,
        reward=reward,
        loss_mask=list(loss_mask),
        weight_versions=[str(span.weights.version) for span in sample.spans],
        rollout_log_probs=sample.logprobs.tolist(),
        status=_STATUS[sample.finish],
        metadata=dict(prompt.metadata),
    )


def group_to_slime(group: ScoredGroup) -> list[Sample]:
    """All answers of a group in slime's terms."""
    samples = [to_slime(group.prompt, scored.sample, scored.reward, scored.loss_mask) for scored in group.samples]
    for sample in samples:
        sample.group_id = group.group_id
    return samples


_FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters"
OUR_NAMES = {
    f"{_FILTERS}.check_reward_nonzero_std": "asyncrl.filters.check_reward_nonzero_std",
    # Its fallback keeps equal rewards rather than start another wave of sampling; here there are no waves.
    f"{_FILTERS}.check_reward_nonzero_std_with_fallback": "asyncrl.filters.check_reward_nonzero_std",
}
"""slime's built-in functions that we have as well, by dotted path."""

_STATUS = {
    FinishReason.STOP: SlimeStatus.COMPLETED,
    FinishReason.LENGTH: SlimeStatus.TRUNCATED,
    FinishReason.ABORT: SlimeStatus.ABORTED,
}
