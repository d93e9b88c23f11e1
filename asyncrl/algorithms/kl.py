"""Estimates of the KL divergence of a policy from a reference, from the log-probs of sampled tokens alone.

The first three are from http://joschu.net/blog/kl-approx.html.  Shape letters: T response tokens.
"""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from asyncrl.algorithms.losses import MAX_LOG_RATIO

KlType = Literal["k1", "k2", "k3", "low_var_kl"]
MAX_LOW_VAR = 10.0
"""Bound of ``low_var_kl`` in either direction, as in slime."""


def kl_estimate(kind: KlType, logprobs_T: Tensor, ref_logprobs_T: Tensor, weights_T: Tensor | None = None) -> Tensor:
    """Estimate ``KL(pi || pi_ref)`` for each token, in nats, where pi sampled the tokens; d = log pi - log pi_ref.

    - ``k1``: ``d``.  Unbiased, of either sign.  Its gradient has mean 0, so as a loss it has no effect on average.
    - ``k2``: ``d^2 / 2``.  Slightly biased, never negative; its gradient is that of the KL divergence.
    - ``k3``: ``exp(-d) - 1 + d``.  Unbiased, never negative: GRPO's, DeepSeekMath (arXiv 2402.03300), equation 4.
    - ``low_var_kl``: ``k3``, clamped to +-10.

    ``weights_T`` multiplies the estimates before the clamp, as in slime: no weight makes a token's cost unbounded.
    """
    difference_T = (logprobs_T - ref_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kl_T = _ESTIMATES[kind](difference_T)
    if weights_T is not None:
        kl_T = kl_T * weights_T
    return kl_T.clamp(-MAX_LOW_VAR, MAX_LOW_VAR) if kind == "low_var_kl" else kl_T


def _k1(difference_T: Tensor) -> Tensor:
    return difference_T


def _k2(difference_T: Tensor) -> Tensor:
    return difference_T.square() / 2


def _k3(difference_T: Tensor) -> Tensor:
    return (-difference_T).expm1() + difference_T


_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3, "low_var_kl": _k3}
