"""The generation of samples and the staleness bound."""

from dataclasses import dataclass
from typing import Annotated, Literal

from asyncrl.config.areas.ranges import above, at_least, must, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """The generation of samples, their rewards, and the staleness bound."""

    num_rollout: Annotated[int, "Number of training steps in the run (slime's name: one rollout batch per step)."]
    rollout_batch_size: Annotated[int, "Number of prompts (groups) per training step."]
    n_samples_per_prompt: Annotated[int, "Number of samples per group."] = 1
    rollout_temperature: Annotated[float, "Sampling temperature, above 0."] = 1.0
    rollout_top_p: Annotated[
        float, "Top-p of nucleus sampling; 1.0 is off. Training renormalises log-probs over the ids that it keeps."
    ] = 1.0
    rollout_top_k: Annotated[
        int, "Top-k of sampling; -1 is off. Training renormalises log-probs over the ids that it keeps."
    ] = -1
    rollout_max_response_len: Annotated[int, "Maximum length of one response in tokens."] = 1024
    rollout_stop: Annotated[tuple[str, ...], "Stop strings: texts that end a response."] = ()
    rollout_stop_token_ids: Annotated[
        tuple[int, ...], "Ids of tokens that end a response, in addition to the model's end token."
    ] = ()
    rollout_skip_special_tokens: Annotated[
        bool | None,
        "Leave special tokens, such as the end token, out of a response's text. Default: off; on with --rm-type exact, "
        "number, f1 or ifeval, also where a row names them.",
    ] = None
    sglang_server_concurrency: Annotated[int, "Maximum number of samples in flight per rollout engine."] = 512
    update_weights_interval: Annotated[int, "Number of training steps between weight updates of the engines."] = 1
    max_staleness: Annotated[
        int | None,
        "Maximum age of a trained token, in training steps; 0 is synchronous training. Default: "
        "--update-weights-interval.",
    ] = None
    stale_policy: Annotated[
        Literal["wait", "mask", "drop"],
        "Action when a group that is due now is unfinished: wait for it, mask its tokens that are too old "
        "out of the loss later, or drop it and start its prompt again.",
    ] = "wait"
    weight_update_mode: Annotated[
        Literal["in_place", "retract", "abort"],
        "Effect of a weight update on samples in flight: they keep their KV cache (in_place), recompute it "
        "(retract), or are aborted and resubmitted with their tokens so far (abort).",
    ] = "in_place"
    dynamic_sampling_filter_path: Annotated[
        str | None,
        "Function that decides which groups are kept, as dotted.path, module:function or file.py:function. Default: "
        "keep all.",
    ] = None
    over_sampling_batch_size: Annotated[
        int | None,
        "Maximum number of groups in flight per --rollout-batch-size groups needed. Default: as many as the filter's "
        "recent acceptance rate requires; with --stale-policy drop, no more than needed.",
    ] = None
    async_buffer_size: Annotated[
        int | None,
        "Maximum number of batches that wait for training, each of --rollout-batch-size groups, including groups in "
        "flight that will join them. Default: as many as --max-staleness allows.",
    ] = None
    buffer_filter_path: Annotated[
        str | None,
        "Function that picks the groups of a batch from the waiting groups, in the notation of "
        "--dynamic-sampling-filter-path. Default: oldest first.",
    ] = None
    partial_rollout: Annotated[
        bool,
        "Interrupt groups that would exceed the staleness bound, keep their tokens, and resume them under newer "
        "weights.",
    ] = False
    mask_offpolicy_in_partial_rollout: Annotated[
        bool, "Train a resumed group only on the tokens generated after its last resume; requires --partial-rollout."
    ] = False
    use_rollout_routing_replay: Annotated[
        bool | None,
        "Train each token of a mixture of experts with the experts that the engine chose for it. Default: on for "
        "mixtures, unless a flag of the engines keeps SGLang from recording its choice.",
    ] = None
    follow_kv_cache: Annotated[bool, "Limit the samples in flight to what the engines' KV caches can hold."] = False

    def __post_init__(self) -> None:
        top_p, top_k = self.rollout_top_p, self.rollout_top_k
        refuse(
            at_least(self, 1, "num_rollout", "rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len")
            + above(self, 0, "rollout_temperature")
            + must(0 < top_p <= 1, f"rollout-top-p must be above 0 and at most 1, got {top_p}")
            + must(top_k == -1 or top_k >= 1, f"rollout-top-k must be -1 (off) or at least 1, got {top_k}")
            + at_least(self, 1, "sglang_server_concurrency", "update_weights_interval")
            + at_least(self, 1, "over_sampling_batch_size", "async_buffer_size")
            + at_least(self, 0, "max_staleness")
            + must("" not in self.rollout_stop, "rollout-stop must not contain an empty string")
        )

    @property
    def staleness(self) -> int:
        """The maximum number of steps between generating a token and training on it."""
        return self.update_weights_interval if self.max_staleness is None else self.max_staleness

    @property
    def buffer_groups(self) -> int | None:
        """The maximum number of groups that wait for training; None without ``--async-buffer-size``."""
        return None if self.async_buffer_size is None else self.async_buffer_size * self.rollout_batch_size

    @property
    def samples_per_step(self) -> int:
        """The number of samples of one training step."""
        return self.rollout_batch_size * self.n_samples_per_prompt
