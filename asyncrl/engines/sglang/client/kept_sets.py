"""The ids among which tokens were drawn: when to ask SGLang for them, and what happens where it has none.

With top-p, top-k or min-p the log-probs of the answer are those of the whole vocabulary, not of the policy that drew
the tokens.  ``return_sampling_mask`` returns the ids that were kept and the log-probs over them.
"""

import logging
from typing import Any

from asyncrl.types import Request, SamplingParams

_FIELD = "return_sampling_mask"
WHOLE_VOCABULARY = 2**30 - 1
"""A top-k above any vocabulary.  SGLang 0.5.16 refuses the field without a limit, and 2**30 is its "no limit"."""

logger = logging.getLogger(__name__)


class KeptSets:
    """The knowledge of a client about the kept sets of its servers."""

    def __init__(self) -> None:
        self._is_refused = False
        self._has_warned = False

    def is_asked(self, request: Request) -> bool:
        """Return whether to ask for the kept sets of ``request``."""
        return is_needed(request) and not self._is_refused and _is_told(request.sampling)

    def fields(self, request: Request) -> dict[str, Any]:
        """Return the further fields of the body."""
        return {_FIELD: True} if self.is_asked(request) else {}

    def top_k(self, request: Request) -> int:
        """Return the top-k to send."""
        top_k = request.sampling.top_k
        return WHOLE_VOCABULARY if top_k <= 0 and self.is_asked(request) else top_k

    def is_refusal(self, error: Exception) -> bool:
        """Return whether a server refused a request for its kept sets; if so, ask for none from now on."""
        if _FIELD not in str(error):
            return False
        self._is_refused = True
        self.warn(str(error))
        return True

    def warn(self, why: str) -> None:
        """Say once that log-probs are unknown."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the ids that top-p, top-k and min-p keep are not known (%s): such tokens are trained with the "
                "trainer's log-probs from the start of the step, over the whole vocabulary",
                why,
            )

    def why_missing(self, request: Request) -> str:
        """Return the reason why an answer has no kept sets."""
        if not _is_told(request.sampling):
            return "SGLang reports other ids than it draws from with min_p, top-p and top-k together"
        return "SGLang returns none; behind the router it needs asyncrl's plug-ins"


def is_needed(request: Request) -> bool:
    """Return whether the log-probs of ``request`` must be over the kept ids."""
    return request.returns_kept and request.sampling.is_limited


def _is_told(sampling: SamplingParams) -> bool:
    """Return whether SGLang's mask has the ids that its samplers draw from.

    The mask applies top-k, top-p and min-p to one distribution.  FlashInfer's sampler with min-p renormalises after
    top-k, and therefore keeps fewer ids under top-p.
    """
    return not ((sampling.extra.get("min_p") or 0) > 0 and sampling.top_k > 0 and sampling.top_p < 1)
