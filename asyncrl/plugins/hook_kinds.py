"""The required signature of the hooks of a step and of the log functions."""

from asyncrl.compat.batch_hooks import (
    all_samples_from_slime,
    convert_from_slime,
    reward_post_process_from_slime,
    sample_filter_from_slime,
)
from asyncrl.compat.log_functions import eval_log_from_slime, rollout_log_from_slime
from asyncrl.hooks.native import all_samples, convert, reward_post_process, sample_filter
from asyncrl.plugins.kinds import Kind
from asyncrl.protocols import BatchHook, EvalLogFn, RolloutLogFn

SAMPLE_FILTER: Kind[BatchHook] = Kind(
    flag="--rollout-sample-filter-path",
    is_async=False,
    parameters=("step", "groups"),
    slime_parameters=("args", "groups"),
    from_slime=sample_filter_from_slime,
    from_native=sample_filter,
)
ALL_SAMPLES: Kind[BatchHook] = Kind(
    flag="--rollout-all-samples-process-path",
    is_async=False,
    parameters=("step", "trained", "filtered"),
    slime_parameters=("args", "all_groups", "data_source"),
    from_slime=all_samples_from_slime,
    from_native=all_samples,
)
POST_PROCESS: Kind[BatchHook] = Kind(
    flag="--custom-reward-post-process-path",
    is_async=False,
    parameters=("groups",),
    slime_parameters=("args", "samples"),
    from_slime=reward_post_process_from_slime,
    from_native=reward_post_process,
)
CONVERT: Kind[BatchHook] = Kind(
    flag="--custom-convert-samples-to-train-data-path",
    is_async=False,
    parameters=("batch",),
    slime_parameters=("args", "samples"),
    from_slime=convert_from_slime,
    from_native=convert,
)
ROLLOUT_LOG: Kind[RolloutLogFn] = Kind(
    flag="--custom-rollout-log-function-path",
    is_async=False,
    parameters=("step", "batch", "row"),
    slime_parameters=("rollout_id", "args", "samples", "extra_metrics", "rollout_time"),
    from_slime=rollout_log_from_slime,
)
EVAL_LOG: Kind[EvalLogFn] = Kind(
    flag="--custom-eval-rollout-log-function-path",
    is_async=False,
    parameters=("step", "report", "row"),
    slime_parameters=("rollout_id", "args", "data", "extra_metrics"),
    from_slime=eval_log_from_slime,
)
