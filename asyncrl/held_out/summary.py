"""The numbers of one set of held-out prompts."""

from collections.abc import Sequence

from asyncrl.held_out.estimates import clustered_mean, mean_pass_at_k, powers_of_two
from asyncrl.held_out.majority import majority
from asyncrl.types import Estimate, EvalAnswers, EvalSetReport, FinishReason, ScoredSample

RIGHT_OR_WRONG = frozenset({-1.0, 0.0, 1.0})
"""The rewards of a set whose answers are right (1) or wrong, if no threshold is given."""


def summary(
    answers: Sequence[EvalAnswers],
    *,
    samples_per_prompt: int,
    pass_threshold: float | None,
    num_failed: int,
) -> EvalSetReport | None:
    """Return the numbers of a set; None without any answer.

    ``pass_threshold`` is the reward from which an answer is right.  None: 1, if every reward is -1, 0 or 1; otherwise
    there is no pass@k.  A prompt with fewer than k answers is left out of pass@k and majority@k.
    """
    samples = [scored for each in answers for scored in each.samples]
    mean = clustered_mean([[scored.reward for scored in each.samples] for each in answers])
    if mean is None:
        return None
    lengths = [scored.sample.num_generated for scored in samples]
    threshold = _threshold(samples, pass_threshold)
    passes: dict[int, Estimate] = {}
    majorities: dict[int, Estimate] = {}
    if threshold is not None:
        rights = [[scored.reward >= threshold for scored in each.samples] for each in answers]
        ks = powers_of_two(samples_per_prompt)
        passes = {k: found for k in ks if (found := mean_pass_at_k(rights, k)) is not None}
        votes = [list(zip(each.finals, right, strict=True)) for each, right in zip(answers, rights, strict=True)]
        most = clustered_mean([[majority(each)] for each in votes if len(each) == samples_per_prompt])
        majorities = {} if most is None or samples_per_prompt == 1 else {samples_per_prompt: most}
    return EvalSetReport(
        mean=mean,
        pass_at=passes,
        majority_at=majorities,
        truncated=sum(scored.sample.finish is FinishReason.LENGTH for scored in samples) / len(samples),
        tokens_mean=sum(lengths) / len(lengths),
        tokens_max=max(lengths),
        num_failed=num_failed,
    )


def _threshold(samples: Sequence[ScoredSample], given: float | None) -> float | None:
    if given is not None:
        return given
    return 1.0 if RIGHT_OR_WRONG.issuperset(scored.reward for scored in samples) else None
