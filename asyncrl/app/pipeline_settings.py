"""The settings of the pipeline that a configuration describes."""

from asyncrl.config import FailureConfig, RolloutConfig
from asyncrl.pipeline.scheduling.admission import Limits
from asyncrl.pipeline.scheduling.budgets import Budgets
from asyncrl.pipeline.scheduling.group_buffer import StalenessPolicy
from asyncrl.types import SamplingParams


def limits(rollout: RolloutConfig) -> Limits:
    """Return the limits of admission."""
    return Limits(
        groups_per_step=rollout.rollout_batch_size,
        group_size=rollout.n_samples_per_prompt,
        max_staleness=rollout.staleness,
        num_steps=rollout.num_rollout,
        over_sampling=rollout.over_sampling_batch_size,
        buffer_size=rollout.buffer_groups,
    )


def policy(rollout: RolloutConfig) -> StalenessPolicy:
    """Return what happens to tokens that are too old."""
    return StalenessPolicy(
        stale=rollout.stale_policy,
        partial=rollout.partial_rollout,
        mask_resumed=rollout.mask_offpolicy_in_partial_rollout,
    )


def budgets(failures: FailureConfig) -> Budgets:
    """Return the numbers of failures after which the run stops."""
    return Budgets(
        max_failed_groups=failures.max_failed_groups,
        max_filtered_groups=failures.max_filtered_groups,
        watchdog_timeout_s=failures.watchdog_timeout_s,
        reward_outage_s=failures.reward_outage_s,
    )


def sampling(rollout: RolloutConfig, end_tokens: tuple[int, ...]) -> SamplingParams:
    """Return the sampling settings of training; ``end_tokens`` are the model's."""
    return SamplingParams(
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_new_tokens=rollout.rollout_max_response_len,
        stop=rollout.rollout_stop,
        stop_token_ids=(*end_tokens, *rollout.rollout_stop_token_ids),
    )
