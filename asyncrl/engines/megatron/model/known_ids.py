"""The ids whose log-probs a pass needs besides those of the response tokens: the kept ones and the likeliest ones.

Shape letters: R response tokens of a microbatch, M those of them that this rank predicts, N the further ids of these M
tokens, I the likeliest ids of all R tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.engines.megatron.model.logprobs import FurtherIds, TokenLogprobs, over_kept_ids
from asyncrl.engines.megatron.model.packing import Microbatch, Part
from asyncrl.engines.megatron.setup.transfer import on_device
from asyncrl.token_columns import TokenSets


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIds:
    """Further ids of the response tokens that this rank predicts: the kept and the likeliest ones of each token."""

    further: FurtherIds
    kept_N: Tensor
    """Indices of the kept ids among the further ids."""
    kept_rows: Tensor
    """Their tokens."""
    top_N: Tensor
    """Indices of the likeliest ids among the further ids."""
    top_rows: Tensor
    places_I: Tensor
    """Indices of this rank's likeliest ids among those of the row."""
    num_top: int
    """Number of likeliest ids of the row, over all context-parallel ranks."""

    def read(self, found: TokenLogprobs) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs and entropies over the kept ids, and the log-probs of the likeliest ids over them."""
        assert found.further_N is not None, "the pass must have been asked for these ids"
        logprobs_M, entropies_M, mass_M = over_kept_ids(found, found.further_N[self.kept_N], self.kept_rows)
        return logprobs_M, entropies_M, found.further_N[self.top_N] - mass_M[self.top_rows]


def known_ids(row: Microbatch, part: Part, device: torch.device, *, wants_top: bool) -> KnownIds | None:
    """Collect the further ids of ``part`` of the row; None if there are none on any rank."""
    top = row.top if wants_top else None
    if row.kept is None and top is None:
        return None
    nothing = TokenSets.unknown(len(row.targets_R))
    whole = (row.kept or nothing, top or nothing)
    kept, likeliest = (sets.take(part.mine_M) for sets in whole)
    keys = [sets.tokens_I * 2**31 + sets.ids_I for sets in (kept, likeliest)]
    union = np.unique(np.concatenate(keys))  # an id may be kept and likely; each is read once
    places = [np.searchsorted(union, each) for each in keys]
    counts_M = np.bincount(union // 2**31, minlength=len(part.mine_M)).astype(np.int32)
    is_mine = np.isin(np.arange(len(row.targets_R)), part.mine_M)

    def moved(values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        return on_device(values, device)

    return KnownIds(
        further=FurtherIds(counts_R=counts_M, ids_N=moved(union % 2**31)),
        kept_N=moved(places[0]),
        kept_rows=moved(kept.tokens_I),
        top_N=moved(places[1]),
        top_rows=moved(likeliest.tokens_I),
        places_I=moved(np.flatnonzero(np.repeat(is_mine, whole[1].counts_T))),
        num_top=len(whole[1].ids_I),
    )
