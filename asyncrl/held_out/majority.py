"""The majority vote over the answers to one prompt: Wang et al., "Self-Consistency" (2022), arXiv:2203.11171."""

from collections import defaultdict
from collections.abc import Sequence


def majority(votes: Sequence[tuple[str | None, bool]]) -> float:
    """Return the probability that the most frequent final answer is right, from (final answer, is right) pairs.

    An answer without a final answer has no vote; 0.0 if no answer has one.  If several final answers are equally
    frequent, one of them is drawn with equal probability, and the expectation is returned.  If equal final answers have
    different verdicts, the share of right ones counts.
    """
    verdicts: dict[str, list[bool]] = defaultdict(list)
    for final, is_right in votes:
        if final is not None:
            verdicts[final].append(is_right)
    most = max(map(len, verdicts.values()), default=0)
    winners = [rights for rights in verdicts.values() if len(rights) == most]
    return sum(sum(rights) / len(rights) for rights in winners) / len(winners) if winners else 0.0
