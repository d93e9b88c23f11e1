"""A filter with arguments: it names a reason for each group that it drops, and each reason becomes a metric."""

from collections import Counter
from dataclasses import dataclass

from asyncrl.types import ScoredGroup


@dataclass(frozen=True)
class Useful:
    """Drop groups without a difference in reward, and groups that are mostly one answer."""

    most_same: float
    """Largest share of equal answers in a group that is kept."""

    def __call__(self, group: ScoredGroup) -> str | None:
        rewards = {scored.reward for scored in group.samples}
        if len(rewards) == 1:
            return "all_right" if rewards.pop() > 0 else "all_wrong"
        [(_, most)] = Counter(scored.sample.text for scored in group.samples).most_common(1)
        return "repeats" if most > self.most_same * len(group.samples) else None
