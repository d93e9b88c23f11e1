"""One microbatch through a model: log-probs or values, loss, and the numbers to report.

Shape letters: T tokens of a microbatch, R its response tokens, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from asyncrl.engines.megatron.logprobs import token_logprobs
from asyncrl.engines.megatron.objective import Objective, ValueObjective
from asyncrl.engines.megatron.packing import Floats, Microbatch

Step = Callable[[Iterator[Microbatch], Any], tuple[Any, Callable[..., Any]]]
"""As Megatron's schedules call it: takes a microbatch, returns the output and the loss still to be taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one microbatch gave."""

    row: Microbatch
    told_R: Tensor
    """Log-probs, or values."""
    sums: dict[str, Tensor]
    """By the name of a metric: loss (its share of the update's), and sums over its trained tokens; in float64.  Empty
    without an objective."""

    def by_sample(self) -> dict[int, Floats]:
        """What was told of each sample's tokens, by its place in the batch."""
        rows: Sequence[Tensor] = ()
        if self.row.lengths:
            rows = self.told_R.cpu().split(list(self.row.lengths))  # type: ignore[no-untyped-call]
        return {index: row.numpy() for index, row in zip(self.row.indices, rows, strict=True)}


def loss_step(objective: Objective, device: torch.device) -> Step:
    """Log-probs, and the policy's loss."""
    words = _Words(objective.temperature, entropy_gradient=objective.train.entropy_coef > 0)

    def loss(row: Microbatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        logprobs_R, entropies_R = output
        return *objective.loss(row, logprobs_R, entropies_R), logprobs_R

    return _step(words, device, loss)


def logprob_step(temperature: float, device: torch.device) -> Step:
    """Log-probs only."""

    def loss(row: Microbatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        return output[0].sum(), {}, output[0]  # the schedule wants a loss; there is no way back

    return _step(_Words(temperature, entropy_gradient=False), device, loss)


def value_loss_step(objective: ValueObjective, head: nn.Linear, device: torch.device) -> Step:
    """Values, and the critic's loss."""

    def loss(row: Microbatch, values_R: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        return *objective.loss(row, values_R), values_R

    return _step(_Values(head), device, loss)


def value_step(head: nn.Linear, device: torch.device) -> Step:
    """Values only."""

    def loss(row: Microbatch, values_R: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        return values_R.sum(), {}, values_R

    return _step(_Values(head), device, loss)


def _step(
    reader: "_Words | _Values",
    device: torch.device,
    loss: Callable[[Microbatch, Any], tuple[Tensor, dict[str, Tensor], Tensor]],
) -> Step:
    def finish(row: Microbatch, output: Any) -> tuple[Tensor, Tensor, Outcome]:
        value, sums, told_R = loss(row, output)
        # Megatron would divide by this number of tokens; the loss has its scale already.
        no_tokens = torch.zeros((), dtype=torch.int, device=value.device)
        return value, no_tokens, Outcome(row=row, told_R=told_R.detach(), sums=sums)

    def step(rows: Iterator[Microbatch], model: Any) -> tuple[Any, Callable[..., Any]]:
        row = next(rows)
        return _run_model(model, row, reader, device), partial(finish, row)

    return step


def _run_model(model: Any, row: Microbatch, reader: "_Words | _Values", device: torch.device) -> Any:
    """What ``reader`` makes of the hidden states from which each response token of ``row`` is predicted."""
    edges = torch.from_numpy(row.edges).to(device)
    return model(
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
        output_processor=reader,
        output_processor_context=(
            torch.from_numpy(row.sources_R).to(device),
            torch.from_numpy(row.targets_R).to(device),
        ),
    )


class _Words:
    """In the place of GPTModel's output: log-prob and entropy of every response token.  Prompts get no logits."""

    def __init__(self, temperature: float, *, entropy_gradient: bool) -> None:
        self._temperature, self._entropy_gradient = temperature, entropy_gradient

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        context: tuple[Tensor, Tensor],
        **unused: Any,
    ) -> tuple[Tensor, Tensor]:
        sources_R, targets_R = context

        def project(hidden: Tensor) -> Tensor:
            logits: Tensor = output_layer(hidden, weight=output_weight)[0]
            return logits

        hidden_RH = hidden_states.squeeze(1).index_select(0, sources_R)
        return token_logprobs(hidden_RH, project, targets_R, self._temperature, entropy_gradient=self._entropy_gradient)


class _Values:
    """In the place of GPTModel's output: the critic's value before every response token, in float32."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head

    def __call__(self, *, hidden_states: Tensor, context: tuple[Tensor, Tensor], **unused: Any) -> Tensor:
        hidden_RH = hidden_states.squeeze(1).index_select(0, context[0])
        values_R1 = nn.functional.linear(hidden_RH.float(), self._head.weight.float(), self._head.bias.float())
        return values_R1.squeeze(1)
