"""The GPU kernels of packed causal attention, and the choice between them.

The choice comes from times measured on an H200 (benchmarks/results/attention_h200_2026-11-24.md).  FlashAttention 4 is
the kernel on Hopper GPUs.  It takes 0.51 to 0.63 of the time of FlashAttention 2 for answers of 300 tokens to 32,768,
and is never slower than cuDNN for them.  For answers of 150 tokens it takes 0.94 of the time of FlashAttention 2; cuDNN
is faster for them, but only if they are equally long.  Everywhere else torch's FlashAttention 2 is the kernel.
Shape letters: T tokens, K keys, A attention heads, G heads of keys and values, D head dimension, V that of values.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from asyncrl.internals import Internal

logger = logging.getLogger(__name__)

INTERNALS = (
    Internal(
        name="torch.nn.attention.varlen.varlen_attn",
        parameters=("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"),
        keywords=("scale", "window_size"),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""

KERNEL_WIDTH = 8
"""Head dimensions are a multiple of this for both kernels."""
_NARROWEST, _WIDEST = 64, 256
"""The head dimensions for which FlashAttention 4 is taken on Hopper.  It claims to take 8 and more, but its compiler
fails at 16."""
_HOPPER = 9
"""The major compute capability of the GPUs where FlashAttention 4 was measured and compared with the plain result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """Runs of neighbouring tokens of one sample, and the keys that each run attends to.

    The last token of a stretch sees all of its keys, the token before it all but one, and so on.
    """

    token_edges: Tensor
    """Offsets of the stretches among the tokens, followed by the end of the last one."""
    key_edges: Tensor
    """Offsets of their keys in the same form."""
    longest_tokens: int
    longest_keys: int
    key_places: Tensor | None = None
    """Index of each key among the keys of all context-parallel ranks; None: the rank's keys are used in order."""


def takes_kernel(query_TAD: Tensor) -> bool:
    """Return whether a kernel attends: the kernels support neither a CPU nor float32."""
    return query_TAD.is_cuda and query_TAD.dtype != torch.float32


def attended_one_by_one(
    query_TAD: Tensor, key_KGD: Tensor, value_KGV: Tensor, stretches: Stretches, scale: float
) -> Tensor:
    """Return the attended values, T x A x V, with one call of torch's attention for each stretch."""
    num_tokens, num_keys = stretches.token_edges.diff().tolist(), stretches.key_edges.diff().tolist()
    cut = ((query_TAD, num_tokens), (key_KGD, num_keys), (value_KGV, num_keys))
    attended = [
        _attended(query, key, value, scale)
        for query, key, value in zip(*(torch.split(x.transpose(0, 1), sizes, dim=1) for x, sizes in cut), strict=True)
    ]
    return torch.cat(attended, dim=1).transpose(0, 1)


def attended_by_kernel(
    query_TAD: Tensor, key_KGD: Tensor, value_KGV: Tensor, stretches: Stretches, scale: float
) -> Tensor:
    """Return the attended values, T x A x V.  The tensors are on a GPU, in bfloat16 or float16."""
    if uses_flash_4(query_TAD.device, query_TAD.shape[-1], value_KGV.shape[-1]):
        return flash_4(query_TAD, key_KGD, value_KGV, stretches, scale)
    return flash_2(query_TAD, key_KGD, value_KGV, stretches, scale)


def uses_flash_4(device: torch.device, query_width: int, value_width: int) -> bool:
    """Return whether FlashAttention 4 is the kernel of this GPU for heads of these widths."""
    return has_flash_4(device) and fits_flash_4(query_width, value_width)


@functools.cache
def has_flash_4(device: torch.device) -> bool:
    """Return whether FlashAttention 4 is the kernel of this GPU; warns where its package cannot be imported."""
    if torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return False
    try:
        importlib.import_module("flash_attn.cute")
    except ImportError as error:
        logger.warning(
            "attention takes FlashAttention 2, at half the speed: flash-attn-4 cannot be imported: %s", error
        )
        return False
    return True


def fits_flash_4(query_width: int, value_width: int) -> bool:
    """Return whether FlashAttention 4 takes heads of these widths."""
    return all(width % KERNEL_WIDTH == 0 and _NARROWEST <= width <= _WIDEST for width in (query_width, value_width))


def flash_4(query_TAD: Tensor, key_KGD: Tensor, value_KGV: Tensor, stretches: Stretches, scale: float) -> Tensor:
    """Attend by FlashAttention 4, which compiles for seven seconds at its first call with each pair of widths."""
    from flash_attn.cute import flash_attn_varlen_func

    # Causal attention of fewer tokens than keys is aligned at the end, as ``Stretches`` asks.
    attended = flash_attn_varlen_func(
        query_TAD,
        key_KGD,
        value_KGV,
        cu_seqlens_q=stretches.token_edges,
        cu_seqlens_k=stretches.key_edges,
        max_seqlen_q=stretches.longest_tokens,
        max_seqlen_k=stretches.longest_keys,
        softmax_scale=scale,
        causal=True,
    )
    out: Tensor = attended[0] if isinstance(attended, tuple) else attended
    return out


def flash_2(query_TAD: Tensor, key_KGD: Tensor, value_KGV: Tensor, stretches: Stretches, scale: float) -> Tensor:
    """Attend by torch's FlashAttention 2."""
    return in_one_width(partial(_varlen, stretches, scale), query_TAD, key_KGD, value_KGV)


def in_one_width(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], query_TAD: Tensor, key_KGD: Tensor, value_KGV: Tensor
) -> Tensor:
    """Call ``attend`` with heads padded to one width, a multiple of ``KERNEL_WIDTH``.

    Zeros appended to queries and keys change no score.  Zeros appended to values are cut off the result: latent
    attention has values that are narrower than its queries.
    """
    width = max(query_TAD.shape[-1], value_KGV.shape[-1])
    width += -width % KERNEL_WIDTH
    query, key, value = (
        x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query_TAD, key_KGD, value_KGV)
    )
    return attend(query, key, value)[..., : value_KGV.shape[-1]]


def _attended(query_ATD: Tensor, key_GKD: Tensor, value_GKV: Tensor, scale: float) -> Tensor:
    num_tokens, num_keys = query_ATD.shape[1], key_GKD.shape[1]
    is_whole = num_tokens == num_keys
    sees = None
    if not is_whole:
        ones = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=query_ATD.device)
        sees = ones.tril(num_keys - num_tokens)
    return F.scaled_dot_product_attention(
        query_ATD, key_GKD, value_GKV, attn_mask=sees, is_causal=is_whole, scale=scale, enable_gqa=True
    )


def _varlen(stretches: Stretches, scale: float, query_TAD: Tensor, key_KGD: Tensor, value_KGD: Tensor) -> Tensor:
    attended = varlen_attn(
        query_TAD,
        key_KGD,
        value_KGD,
        stretches.token_edges,
        stretches.key_edges,
        stretches.longest_tokens,
        stretches.longest_keys,
        scale=scale,
        window_size=(-1, 0),
    )
    assert isinstance(attended, Tensor)
    return attended
