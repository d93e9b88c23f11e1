"""Sampling of tokens with per-request seeds in plain torch; upstream's needs Triton.  See ``cpu_platform``."""

import torch


def draw_with_seed(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Sample one column index for each row of ``logprobs`` (n, m); ``seed`` and ``positions`` are (n,).

    A row's sample depends only on its log-probs, seed and position, not on the other rows.  Inverse transform sampling
    with a uniform number hashed from (seed, position): n hashes, where upstream's Gumbel noise needs n * m.
    """
    cumulative = logprobs.double().exp().cumsum(dim=1)
    threshold = _uniform(seed.long(), positions.long()).unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logprobs.shape[1] - 1)


def draw_within_limits(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor | None,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Sample one token id (n,) for each row of ``probs`` (n, m), within the row's top-k, top-p and min-p.

    SGLang 0.5.16 calls this for a whole batch as soon as one row has a limit or is greedy.  Its own function draws a
    rank instead of a token id, so that a row without limits gets another token than it gets alone.  It also refuses
    min-p together with seeds.  Here a row without limits is drawn as by ``draw_with_seed``, and each row's token
    depends on that row alone.
    """
    greedy = top_ks <= 1
    is_limited = ~greedy & ((top_ks < probs.shape[1]) | (top_ps < 1) | (min_ps > 0))
    kept = probs.clone()  # the caller reports log-probs from ``probs``
    rows = is_limited.nonzero().view(-1)
    if len(rows):
        kept[rows] = _limited(probs[rows], top_ks[rows], top_ps[rows], min_ps[rows])
    if sampling_seed is None:
        drawn = torch.multinomial(kept, num_samples=1)
    else:
        drawn = draw_with_seed(kept.log(), sampling_seed, positions)
    return torch.where(greedy, probs.argmax(dim=1), drawn.view(-1)).to(torch.int32)


def _limited(probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor) -> torch.Tensor:
    """Return ``probs`` with 0 for each token outside the row's limits, which apply jointly to the given probabilities.

    Equal probabilities are ranked by token id.
    """
    ordered, token_ids = probs.sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(dim=1) - ordered
    ranks = torch.arange(probs.shape[1], device=probs.device)
    kept = ranks < top_ks.unsqueeze(1)
    kept &= (before <= top_ps.unsqueeze(1)) | (top_ps >= 1).unsqueeze(1)  # rounded sums may exceed 1
    kept &= ordered >= (ordered[:, 0] * min_ps).unsqueeze(1)
    return torch.zeros_like(probs).scatter_(1, token_ids, ordered * kept)


def _uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return numbers uniform on [0, 1) with 53 bits, by splitmix64's finalizer on int64 that wraps around."""
    bits = _mixed(_mixed(seed) + position)
    return ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    bits = bits - 7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * -7723592293110705685  # 0x94D049BB133111EB
    return bits ^ ((bits >> 31) & (2**33 - 1))
