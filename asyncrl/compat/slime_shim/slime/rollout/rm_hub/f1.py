"""The F1 of the words of an answer, with precision and recall."""

import re
import string
from collections import Counter

__all__ = ["f1_score", "normalize_answer"]

_VERDICTS = ("yes", "no", "noanswer")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(s: str) -> str:
    """Return a text in lower case without articles and punctuation."""
    return " ".join(_ARTICLES.sub(" ", s.lower().translate(_PUNCTUATION)).split())


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """Return F1, precision and recall of the words."""
    if prediction is None:
        return 0, 0, 0
    given, wanted = normalize_answer(prediction).split(), normalize_answer(ground_truth).split()
    if given != wanted and (" ".join(given) in _VERDICTS or " ".join(wanted) in _VERDICTS):
        return 0, 0, 0
    shared = (Counter(given) & Counter(wanted)).total()
    if not shared:
        return 0, 0, 0
    precision, recall = shared / len(given), shared / len(wanted)
    return 2 * precision * recall / (precision + recall), precision, recall
