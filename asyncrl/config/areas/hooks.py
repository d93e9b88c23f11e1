"""The user's data source, and the user functions that are called once per step."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from asyncrl.config.areas.ranges import above, at_least, refuse

SLIME_SOURCES = (
    "slime.rollout.data_source.RolloutDataSource",
    "slime.rollout.data_source.RolloutDataSourceWithBuffer",
)
"""slime's own data sources; here they stand for ``--prompt-data``."""

_NOTATION = "in the notation of --dynamic-sampling-filter-path; docs/plugins.md has its signature."


@dataclass(frozen=True, slots=True, kw_only=True)
class HookConfig:
    """The user's data source, and the user functions that are called once per step."""

    data_source_path: Annotated[
        str | None, f"Class or factory of the source of prompts, {_NOTATION} Default: the rows of --prompt-data."
    ] = None
    data_source_prefetch: Annotated[
        int | None,
        "Number of prompts that are fetched ahead from --data-source-path. Default: --rollout-batch-size.",
    ] = None
    data_source_timeout_s: Annotated[
        float, "Time limit for one call of a function of --data-source-path, in seconds."
    ] = 300.0
    rollout_sample_filter_path: Annotated[
        str | None, f"Function that leaves samples of a batch out of the loss, {_NOTATION}"
    ] = None
    rollout_all_samples_process_path: Annotated[
        str | None, f"Function that sees all groups of a step, filtered ones included, {_NOTATION}"
    ] = None
    custom_reward_post_process_path: Annotated[
        str | None, f"Function that replaces the normalization of rewards within groups, {_NOTATION}"
    ] = None
    custom_convert_samples_to_train_data_path: Annotated[
        str | None, f"Function that changes a batch before it is trained, {_NOTATION}"
    ] = None
    custom_rollout_log_function_path: Annotated[str | None, f"Function that sees each trained batch, {_NOTATION}"] = (
        None
    )
    custom_eval_rollout_log_function_path: Annotated[str | None, f"Function that sees each evaluation, {_NOTATION}"] = (
        None
    )
    custom_config_path: Annotated[
        Path | None,
        "YAML file of one mapping. A key that is a setting replaces its value, flags included; any other key becomes "
        "an attribute of args in user functions with slime's signatures.",
    ] = None
    hook_timeout_s: Annotated[
        float, "Time limit for one call of a function that is called once per step, in seconds."
    ] = 300.0

    def __post_init__(self) -> None:
        refuse(at_least(self, 1, "data_source_prefetch") + above(self, 0, "data_source_timeout_s", "hook_timeout_s"))

    @property
    def source(self) -> str | None:
        """The path of the user's data source; None if prompts come from ``--prompt-data``."""
        return None if self.data_source_path in SLIME_SOURCES else self.data_source_path
