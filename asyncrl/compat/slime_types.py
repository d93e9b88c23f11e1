"""The ``args`` and the results of slime's plug-ins; ``slime_sample`` has the samples."""

from argparse import Namespace
from dataclasses import dataclass

SlimeArgs = Namespace
"""The value of every flag, as attributes named with underscores; ``slime_args`` makes that of a run."""


@dataclass(slots=True)
class DynamicFilterOutput:
    """slime's result of a filter.  Mutable, because slime's own filters change it."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
    """No effect.  In slime it keeps a rejected group if replacing it would start another wave of sampling.  Here there
    are no waves: one new group replaces a rejected one."""


_FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters"
OUR_NAMES = {
    f"{_FILTERS}.check_reward_nonzero_std": "asyncrl.filters.check_reward_nonzero_std",
    # slime's fallback keeps equal rewards rather than start another wave of sampling.  Here there are no waves.
    f"{_FILTERS}.check_reward_nonzero_std_with_fallback": "asyncrl.filters.check_reward_nonzero_std",
}
"""The equivalents of slime's built-in functions, by slime's dotted path."""
