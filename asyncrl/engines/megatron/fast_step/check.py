"""The comparison of all fast operations that a rank will use, and its agreement with the other ranks.

operations in use ─▶ compared one by one ─▶ outcomes of all ranks ─▶ one line per operation
                                                                  └▶ FastStepWrong on all ranks alike
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from asyncrl.engines.megatron.fast_step.attention import Attend, compare_attention
from asyncrl.engines.megatron.fast_step.differences import Difference, Outcome
from asyncrl.engines.megatron.fast_step.experts import (
    GatherSum,
    Mixed,
    Swiglu,
    compare_experts,
    compare_gather_sum,
    compare_swiglu,
    mixed,
)
from asyncrl.engines.megatron.fast_step.head import Head, alone, compare_head
from asyncrl.engines.megatron.fast_step.sizes import ExpertSizes, StepSizes
from asyncrl.engines.megatron.fast_step.updates import (
    MakeAdam,
    Norm,
    compare_adam,
    compare_norm,
    foreach_norm,
    fused_adam,
)
from asyncrl.engines.megatron.model.attention_kernels import attended_by_kernel, takes_kernel, uses_flash_4
from asyncrl.engines.megatron.model.logprobs import token_logprobs
from asyncrl.engines.megatron.model.mixture_ops import gather_sum, swiglu, uses_kernels
from asyncrl.engines.megatron.setup.fused_adam import adams
from asyncrl.engines.megatron.setup.gradient_norm import replaces_norm
from asyncrl.engines.megatron.setup.ranks import of_every_rank
from asyncrl.errors import FastStepWrong, first_line

_FLOAT32 = "set dtype to float32 to avoid the kernel"
_FLASH_2 = "uninstall flash-attn-4 to use FlashAttention 2"
_UPDATES = "install TransformerEngine, whose implementation Megatron then uses"
_NO_SETTING = "no setting avoids it: check the GPU and the version of torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class FastOperations:
    """The fast operations of a step; None: the plain form is used."""

    attend: Attend | None
    head: Head
    gather_sum: GatherSum | None
    swiglu: Swiglu | None
    experts: Mixed = mixed
    norm: Norm | None
    make_adam: MakeAdam | None


def operations_in_use(sizes: StepSizes, optimizer: Any) -> FastOperations:
    """Return the operations that a step of these sizes uses, with updates by ``optimizer``."""
    like = torch.empty(0, device=sizes.device, dtype=sizes.dtype)
    has_kernels = uses_kernels(like)
    return FastOperations(
        attend=attended_by_kernel if takes_kernel(like) else None,
        head=token_logprobs,
        gather_sum=gather_sum if has_kernels else None,
        swiglu=swiglu if has_kernels else None,
        norm=foreach_norm if replaces_norm() else None,
        make_adam=fused_adam if any(True for _ in adams(optimizer)) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """The comparison of one operation, and the setting that avoids the operation."""

    operation: str
    compare: Callable[[], Difference]
    advice: str

    def outcome(self) -> Outcome:
        """Compare; an exception becomes an outcome, so that no other rank waits for this one."""
        try:
            return Outcome(operation=self.operation, difference=self.compare(), advice=self.advice)
        except Exception as error:  # noqa: BLE001 (a kernel may raise anything)
            text = f"{type(error).__name__}: {first_line(error)}"
            return Outcome(operation=self.operation, difference=None, error=text, advice=self.advice)


def check_fast_step(sizes: StepSizes, operations: FastOperations) -> tuple[str, ...]:
    """Compare every operation with its plain form; return one line per operation with the largest difference.

    Every rank must call it.  The inputs are random, and models, optimizers and random generators stay as they are.
    Raises FastStepWrong on all ranks alike.
    """
    outcomes = [each.outcome() for each in _local(sizes, operations)]
    found = _agreed(outcomes)
    if sizes.head is not None and sizes.head.group is not None:
        # Invariant: every rank of the group gets here, and none raises before the first collective operation, because
        # the same head without a group has raised nothing on any rank.
        compare = partial(compare_head, sizes, sizes.head, operations.head)
        name = f"log-prob head of {sizes.head.num_parts} ranks"
        outcomes.append(_Comparison(operation=name, compare=compare, advice=_NO_SETTING).outcome())
    found = _agreed(outcomes)
    if sizes.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _agreed(mine: Sequence[Outcome]) -> tuple[str, ...]:
    """Return the line of each operation over all ranks.  Raises FastStepWrong if an operation of any rank differs."""
    worst: dict[str, tuple[int, Outcome]] = {}
    for rank, outcomes in enumerate(of_every_rank(list(mine))):
        for outcome in outcomes:
            known = worst.get(outcome.operation)
            if known is None or outcome.share > known[1].share:
                worst[outcome.operation] = (rank, outcome)
    wrong = [f"rank {rank}, {each} ({each.advice})" for rank, each in worst.values() if not each.is_equal]
    if wrong:
        raise FastStepWrong(f"check-fast-step: {'; '.join(wrong)}; nothing was trained")
    return tuple(f"fast step, {each}" for _, each in worst.values())


def _local(sizes: StepSizes, use: FastOperations) -> Iterator[_Comparison]:
    """Yield the comparisons without collective operations."""
    if use.attend is not None:
        yield _attention(sizes, use.attend)
    if sizes.head is not None:
        compare = partial(compare_head, sizes, alone(sizes.head), use.head)
        yield _Comparison(operation="log-prob head", compare=compare, advice=_kernel_advice(sizes))
    if sizes.experts is not None:
        yield from _mixture(sizes, sizes.experts, use)
    if use.norm is not None:
        compare = partial(compare_norm, sizes.device, use.norm)
        yield _Comparison(operation="gradient norm", compare=compare, advice=_UPDATES)
    if use.make_adam is not None:
        compare = partial(compare_adam, sizes.device, sizes.train, use.make_adam)
        yield _Comparison(operation="fused AdamW", compare=compare, advice=_UPDATES)


def _attention(sizes: StepSizes, attend: Attend) -> _Comparison:
    own = sizes.attention
    is_flash_4 = sizes.device.type == "cuda" and uses_flash_4(sizes.device, own.query_width, own.value_width)
    return _Comparison(
        operation=f"FlashAttention {4 if is_flash_4 else 2}",
        compare=partial(compare_attention, sizes, attend),
        advice=_FLASH_2 if is_flash_4 else _FLOAT32,
    )


def _mixture(sizes: StepSizes, own: ExpertSizes, use: FastOperations) -> Iterator[_Comparison]:
    if use.gather_sum is not None:
        compare = partial(compare_gather_sum, sizes, own, use.gather_sum)
        yield _Comparison(operation="gather-and-sum of experts", compare=compare, advice=_FLOAT32)
    if use.swiglu is not None:
        compare = partial(compare_swiglu, sizes, own, use.swiglu)
        yield _Comparison(operation="SwiGLU of experts", compare=compare, advice=_FLOAT32)
    compare = partial(compare_experts, sizes, own, use.experts)
    yield _Comparison(operation="stacked experts", compare=compare, advice=_NO_SETTING)


def _kernel_advice(sizes: StepSizes) -> str:
    return _NO_SETTING if sizes.dtype == torch.float32 else _FLOAT32
