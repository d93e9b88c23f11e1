"""One microbatch through the model: log-probs, loss, and the numbers to report.

Shape letters: T tokens of a microbatch, R its response tokens, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from asyncrl.algorithms.losses import ppo_clip
from asyncrl.engines.megatron.logprobs import token_logprobs
from asyncrl.engines.megatron.packing import Microbatch

TokenWeights = Callable[[Tensor, Sequence[int]], Tensor]
"""How much each token of a microbatch counts; see ``asyncrl.algorithms.losses``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What one optimiser update minimises."""

    temperature: float
    eps_low: float
    eps_high: float
    weigh: TokenWeights
    count: int
    """What the weighted sum of losses is divided by: over the whole update, on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one microbatch gave."""

    row: Microbatch
    logprobs_R: Tensor
    sums: Tensor
    """Loss (its share of the update's), clipped tokens, entropy of the trained tokens: three numbers in float64."""

    def logprobs_by_sample(self) -> dict[int, tuple[float, ...]]:
        """Log-probs of each sample by its place in the batch."""
        rows: Sequence[Tensor] = ()
        if self.row.lengths:
            rows = self.logprobs_R.cpu().split(list(self.row.lengths))  # type: ignore[no-untyped-call]
        return {index: tuple(row.tolist()) for index, row in zip(self.row.indices, rows, strict=True)}


def forward_step(
    objective: Objective, device: torch.device
) -> Callable[[Iterator[Microbatch], Any], tuple[tuple[Tensor, Tensor], Callable[..., Any]]]:
    """A step as Megatron's schedules call it: takes a microbatch, returns the output and the loss still to be taken."""

    def step(rows: Iterator[Microbatch], model: Any) -> tuple[tuple[Tensor, Tensor], Callable[..., Any]]:
        row = next(rows)
        return run_model(model, row, objective.temperature, device), partial(_loss, row, objective)

    return step


def run_model(model: Any, row: Microbatch, temperature: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every response token of ``row``."""
    edges = torch.from_numpy(row.edges).to(device)
    output: tuple[Tensor, Tensor] = model(
        torch.from_numpy(row.token_ids_T).to(device).unsqueeze(0),
        torch.from_numpy(row.positions_T).to(device).unsqueeze(0),
        None,
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=edges,
            cu_seqlens_kv=edges,
            max_seqlen_q=row.longest,
            max_seqlen_kv=row.longest,
        ),
        output_processor=_response_logprobs,
        output_processor_context=(
            torch.from_numpy(row.sources_R).to(device),
            torch.from_numpy(row.targets_R).to(device),
            temperature,
        ),
    )
    return output


def _response_logprobs(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: tuple[Tensor, Tensor, float],
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """In the place of GPTModel's output: prompts get no logits at all."""
    sources_R, targets_R, temperature = context
    hidden_RH = hidden_states.squeeze(1).index_select(0, sources_R)

    def project(hidden: Tensor) -> Tensor:
        logits: Tensor = output_layer(hidden, weight=output_weight)[0]
        return logits

    return token_logprobs(hidden_RH, project, targets_R, temperature)


def _loss(row: Microbatch, objective: Objective, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Outcome]:
    logprobs_R, entropies_R = output
    device = logprobs_R.device
    mask_R = torch.from_numpy(row.mask_R).to(device)
    detached_R = logprobs_R.detach()
    old_R = detached_R if row.old_logprobs_R is None else torch.from_numpy(row.old_logprobs_R).to(device)
    advantages_R = torch.from_numpy(row.advantages_R).to(device)
    losses_R, clipped_R = ppo_clip(
        logprobs_R, old_R, advantages_R, mask_R, eps_low=objective.eps_low, eps_high=objective.eps_high
    )
    loss = (losses_R * objective.weigh(mask_R, row.lengths).to(device)).sum() / objective.count
    sums = torch.stack(
        [loss.detach().double(), clipped_R.sum().double(), torch.where(mask_R, entropies_R, 0.0).sum().double()]
    )
    # Megatron would divide by this number of tokens; the loss has its scale already.
    return loss, torch.zeros((), dtype=torch.int, device=device), Outcome(row=row, logprobs_R=detached_R, sums=sums)
