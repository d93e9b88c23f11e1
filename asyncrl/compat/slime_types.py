"""The ``args`` and the results of slime's plug-ins; ``slime_sample`` has the samples."""

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

SlimeArgs = Namespace
"""The value of every flag, as attributes named with underscores; ``slime_args`` makes that of a run."""


class EvalDatasetArgs(Namespace):
    """slime's EvalDatasetConfig: the settings of a set of held-out prompts, as attributes."""

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """The settings that decide which prompts there are, as in slime."""
        return self.name, self.path, self.input_key, self.label_key, self.tool_key, self.metadata_key

    def inject_metadata(self, sample_metadata: Any) -> dict[str, Any]:
        """Return a row's metadata with the entries that the set replaces: its reward type, and its overrides."""
        found = sample_metadata if isinstance(sample_metadata, dict) else {}
        return {**found, **self.metadata_overrides}


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
