"""Estimates of the KL divergence of a policy from a reference, from the log-probs of sampled tokens alone.

http://joschu.net/blog/kl-approx.html has the first three.  Shape letters: T response tokens.
"""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from asyncrl.algorithms.losses import MAX_LOG_RATIO

KlType = Literal["k1", "k2", "k3", "low_var_kl"]
MAX_LOW_VAR = 10.0
"""``low_var_kl`` is held within this, in either direction; slime's number."""


def kl_estimate(kind: KlType, logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """One estimate per token, in nats, of ``KL(pi || pi_ref)`` where pi sampled the tokens; d = log pi - log pi_ref.

    - ``k1``: ``d``.  Unbiased, of either sign.  Its gradient alone has mean 0: as a loss it pulls nowhere.
    - ``k2``: ``d^2 / 2``.  Biased a little, never negative; its gradient is that of the KL divergence.
    - ``k3``: ``exp(-d) - 1 + d``.  Unbiased, never negative: GRPO's, DeepSeekMath (arXiv 2402.03300), equation 4.
    - ``low_var_kl``: ``k3``, held within +-10.
    """
    difference_T = (logprobs_T - ref_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return _ESTIMATES[kind](difference_T)


def _k1(difference_T: Tensor) -> Tensor:
    return difference_T


def _k2(difference_T: Tensor) -> Tensor:
    return difference_T.square() / 2


def _k3(difference_T: Tensor) -> Tensor:
    return (-difference_T).expm1() + difference_T


def _low_var_kl(difference_T: Tensor) -> Tensor:
    return _k3(difference_T).clamp(-MAX_LOW_VAR, MAX_LOW_VAR)


_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3, "low_var_kl": _low_var_kl}
