"""The rewards of samples."""

from dataclasses import dataclass
from typing import Annotated, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """The rewards of samples."""

    custom_rm_path: Annotated[
        str | None,
        "Reward function, in the notation of --dynamic-sampling-filter-path. Takes precedence over --rm-type.",
    ] = None
    rm_type: Annotated[
        Literal["number", "exact"] | None,
        "Built-in reward: number compares the last number in the response with the label; exact compares the "
        "stripped texts.",
    ] = None
    reward_key: Annotated[str | None, "Entry of a dict reward that is the reward. Default: score with dapo."] = None
    eval_reward_key: Annotated[str | None, "Like --reward-key, for evaluation. Default: --reward-key."] = None
