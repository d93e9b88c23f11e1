"""The F1 of the words of answer and label, as in SQuAD (Rajpurkar et al. 2016)."""

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from asyncrl.rewards.graders.labels import accepted

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_VERDICTS = ("yes", "no", "noanswer")
"""Answers that count only as a whole."""


def word_f1(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return the F1 of the words of answer and label, 0 to 1; the best one if several answers are accepted.

    Case, punctuation and articles do not count.  Raises RewardFailed if the row has no label.
    """
    words = _words(response)
    return max(_f1(words, _words(answer)) for answer in accepted(label))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _f1(given: list[str], wanted: list[str]) -> float:
    if given != wanted and (" ".join(given) in _VERDICTS or " ".join(wanted) in _VERDICTS):
        return 0.0
    shared = (Counter(given) & Counter(wanted)).total()
    return 2 * shared / (len(given) + len(wanted)) if shared else 0.0
