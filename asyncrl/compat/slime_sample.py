"""slime's ``Sample``: the object that functions of slime's shape receive and return."""

import copy
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from asyncrl.types import Prompt


class SlimeStatus(enum.Enum):
    """slime's names for the state of a sample."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class SpecInfo:
    """slime's counts of speculative decoding; asyncrl leaves them at 0."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add the counts of one answer of SGLang."""
        for name in ("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct"):
            setattr(self, name, getattr(self, name) + meta_info.get(name, 0))
        self.completion_token_num += meta_info.get("completion_tokens", 0)


@dataclass
class PrefixCacheInfo:
    """slime's counts of the prefix cache; asyncrl leaves them at 0 for samples that it generated itself."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add the counts of one answer of SGLang."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)


@dataclass
class Sample:
    """slime's view of one sample, open for further attributes.

    All functions of slime's shape that see an answer see the same object, from its reward to the log function.  Only
    the fields that a hook's description names reach the trainer.
    """

    Status: ClassVar[type[SlimeStatus]] = SlimeStatus
    SpecInfo: ClassVar[type[SpecInfo]] = SpecInfo
    PrefixCacheInfo: ClassVar[type[PrefixCacheInfo]] = PrefixCacheInfo

    group_index: int | None = None
    """The number of the group, never repeated within a run."""
    index: int | None = None
    """The number of the sample, counted over all groups of the run."""
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    """The tokens of prompt and response."""
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: Any = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    """The number of response tokens."""
    label: Any = None
    reward: Any = None
    """The reward: a number, or all entries of a dict reward; None until the sample is scored."""
    loss_mask: list[int] | None = None
    """A 0 or 1 for each response token; None means 1 everywhere."""
    weight_versions: list[str] = field(default_factory=list)
    """The versions of the weights that generated parts of the response, in order."""
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    """Leave the sample out of the loss; it still counts in the normalisation of its group."""
    teacher_log_probs: list[float] | None = None
    status: SlimeStatus = SlimeStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: Any = field(default_factory=SpecInfo)
    prefix_cache_info: Any = field(default_factory=PrefixCacheInfo)

    def get_reward_value(self, args: Any) -> Any:
        """Return the reward, or its entry ``args.reward_key``.  slime's own filters call this."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key and isinstance(self.reward, Mapping) else self.reward

    @property
    def effective_response_length(self) -> int:
        """The number of response tokens in the loss mask."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Any = None,
        log_probs: Any = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append response tokens, with their loss mask and log-probs; the lists are changed in place, as in slime.

        Tokens of the policy are ``trainable`` and need ``log_probs``; others get the mask 0 and the log-prob 0.
        ``meta_info`` of an answer of SGLang sets the status and the weight version.  Raises ValueError.
        """
        ids = [int(each) for each in _plain(tokens)]
        logprobs = _checked_logprobs(ids, None if log_probs is None else _plain(log_probs), trainable)
        if trainable and logprobs and self.rollout_log_probs is None and self.response_length:
            raise ValueError("the sample has response tokens without rollout_log_probs; append to both from the start")
        if text is not None:
            self.response += text
        if logprobs is not None and self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * self.response_length
        if ids:
            if self.loss_mask is None:
                self.loss_mask = [1] * self.response_length
            self.loss_mask += [int(trainable)] * len(ids)
            self.tokens += ids
            self.response_length += len(ids)
        if logprobs is not None and self.rollout_log_probs is not None:
            self.rollout_log_probs += logprobs
        if meta_info is not None and update_terminal_info:
            self.update_from_meta_info(args, meta_info)
        if self.loss_mask is not None and len(self.loss_mask) != self.response_length:
            raise ValueError(f"loss_mask has {len(self.loss_mask)} entries, response_length is {self.response_length}")

    def update_from_meta_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Take status, weight version and cache counts from the ``meta_info`` of a finished answer of SGLang."""
        if "finish_reason" not in meta_info:
            return
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        self.status = _OF_FINISH.get(str((meta_info["finish_reason"] or {}).get("type")), self.status)

    def to_dict(self) -> dict[str, Any]:
        """Return every attribute by name, the status as text."""
        return {
            **vars(self),
            "status": getattr(self.status, "value", self.status),
            "spec_info": vars(self.spec_info).copy(),
            "prefix_cache_info": vars(self.prefix_cache_info).copy(),
        }

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> "Sample":
        """Return the sample of ``to_dict``; further keys become attributes."""
        sample = Sample()
        for name, value in found.items():
            setattr(sample, name, value)
        sample.status = SlimeStatus(sample.status)
        sample.spec_info = SpecInfo(**found.get("spec_info", {}))
        sample.prefix_cache_info = PrefixCacheInfo(**found.get("prefix_cache_info", {}))
        return sample


_OF_FINISH = {"length": SlimeStatus.TRUNCATED, "abort": SlimeStatus.ABORTED, "stop": SlimeStatus.COMPLETED}
"""The status of a sample by the type of SGLang's finish reason."""


def _plain(values: Any) -> list[Any]:
    """Return the values of a list, an array or a tensor; an empty list for None."""
    if values is None:
        return []
    return list(values.reshape(-1).tolist() if hasattr(values, "reshape") else values)


def _checked_logprobs(ids: list[int], logprobs: list[Any] | None, trainable: bool) -> list[float] | None:
    """Return the log-probs of new tokens.  Raises ValueError."""
    if logprobs is not None and len(logprobs) != len(ids):
        raise ValueError(f"tokens has {len(ids)} entries, log_probs has {len(logprobs)}")
    if ids and trainable and logprobs is None:
        raise ValueError("trainable tokens need log_probs")
    if ids and not trainable:
        if logprobs is not None:
            raise ValueError("tokens with trainable=False must have no log_probs")
        return [0.0] * len(ids)
    # None, the null of JSON, stands for the NaN of an engine that could not tell.
    return None if logprobs is None else [math.nan if each is None else float(each) for each in logprobs]


def sample_of(prompt: Prompt) -> Sample:
    """Return a pending sample of a prompt, without tokens, and with copies of all that a function may change."""
    return Sample(
        prompt=prompt.text if prompt.messages is None else copy.deepcopy(list(prompt.messages)),
        label=copy.deepcopy(prompt.label),
        metadata=copy.deepcopy(dict(prompt.metadata)),
        apply_chat_template_kwargs=copy.deepcopy(dict(prompt.template_variables)),
    )
