"""The objects that slime's plug-ins receive: ``Sample`` and ``args``."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

from asyncrl.types import FinishReason, GroupId, JsonValue, Prompt, ScoredGroup
from asyncrl.types import Sample as OurSample

SlimeArgs = SimpleNamespace
"""The value of every flag, as attributes named with underscores: ``SlimeArgs(**config.flat(run))``."""


class SlimeStatus(enum.Enum):
    """slime's names for the state of a sample."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class Sample:
    """slime's view of one sample.  This is a copy: what a plug-in writes to it is lost."""

    Status: ClassVar[type[SlimeStatus]] = SlimeStatus

    group_index: int
    """The row of the prompt in its file."""
    index: int
    """The position in its group."""
    prompt: str | list[dict[str, Any]]
    """The text, or the chat messages of the row without --apply-chat-template."""
    tokens: list[int]
    """The tokens of prompt and response."""
    response: str
    response_length: int
    """The number of response tokens."""
    label: JsonValue
    reward: float | dict[str, Any] | None
    """The reward: a number, or all entries of a dict reward; None until the sample is scored."""
    loss_mask: list[int]
    weight_versions: list[str]
    """The versions of the weights that generated parts of the response, in order."""
    rollout_log_probs: list[float]
    status: SlimeStatus
    metadata: dict[str, Any] = field(default_factory=dict)
    group_id: GroupId | None = None
    """The group's unique id, None before there is one.  slime lacks it: ``group_index`` repeats every epoch."""

    number: float | None = None
    """The number that training uses, if ``reward`` is a dict."""

    def get_reward_value(self, args: SlimeArgs) -> Any:
        """Return the number, or the entry ``args.reward_key`` of a dict reward.  slime's own filters call this."""
        if not isinstance(self.reward, dict):
            return self.reward
        key = getattr(args, "reward_key", None)
        return self.number if key is None else self.reward[key]


@dataclass(slots=True)
class DynamicFilterOutput:
    """slime's result of a filter.  Mutable, because slime's own filters change it."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
    """No effect.  In slime it keeps a rejected group if replacing it would start another wave of sampling.  Here there
    are no waves: one new group replaces a rejected one."""


def to_slime(
    prompt: Prompt,
    sample: OurSample,
    reward: float | None,
    loss_mask: Sequence[int],
    reward_parts: Mapping[str, Any] | None = None,
) -> Sample:
    """Convert one sample to slime's terms; ``reward_parts`` are the entries of a dict reward."""
    return Sample(
        group_index=prompt.row,
        index=sample.index,
        prompt=prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages],
        tokens=[*prompt.token_ids, *sample.token_ids],
        response=sample.text,
        response_length=len(sample.token_ids),
        label=prompt.label,
        reward=dict(reward_parts) if reward_parts else reward,
        number=reward,
        loss_mask=list(loss_mask),
        weight_versions=[str(span.weights.version) for span in sample.spans],
        rollout_log_probs=sample.logprobs.tolist(),
        status=_STATUS[sample.finish],
        metadata=dict(prompt.metadata),
    )


def group_to_slime(group: ScoredGroup) -> list[Sample]:
    """Convert all samples of a group to slime's terms."""
    samples = [
        to_slime(group.prompt, scored.sample, scored.reward, scored.loss_mask, scored.reward_parts)
        for scored in group.samples
    ]
    for sample in samples:
        sample.group_id = group.group_id
    return samples


_FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters"
OUR_NAMES = {
    f"{_FILTERS}.check_reward_nonzero_std": "asyncrl.filters.check_reward_nonzero_std",
    # slime's fallback keeps equal rewards rather than start another wave of sampling.  Here there are no waves.
    f"{_FILTERS}.check_reward_nonzero_std_with_fallback": "asyncrl.filters.check_reward_nonzero_std",
}
"""The equivalents of slime's built-in functions, by slime's dotted path."""

_STATUS = {
    FinishReason.STOP: SlimeStatus.COMPLETED,
    FinishReason.LENGTH: SlimeStatus.TRUNCATED,
    FinishReason.ABORT: SlimeStatus.ABORTED,
}
