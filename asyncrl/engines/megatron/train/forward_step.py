"""One microbatch through a model: log-probs or values, loss, and the numbers to report.

Shape letters: T tokens of a microbatch, R its response tokens, M those of them that this rank predicts, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from asyncrl.engines.megatron.model.attention import packed_row
from asyncrl.engines.megatron.model.logprobs import token_logprobs
from asyncrl.engines.megatron.model.packing import Floats, Microbatch, part_of
from asyncrl.engines.megatron.train.custom_loss import CheckedLoss
from asyncrl.engines.megatron.train.objective import Objective, ValueObjective
from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="megatron.core.models.gpt.gpt_model.GPTModel.forward",
        parameters=("self", "input_ids", "position_ids", "attention_mask"),
        keywords=("packed_seq_params", "output_processor", "output_processor_context"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.models.gpt.gpt_model.GPTModel._postprocess",
        attributes=("hidden_states", "output_layer", "output_weight", "context"),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""


def _nothing_to_raise() -> None:
    """Nothing that ranks would have to tell each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchStep:
    """What a pass does with each microbatch."""

    forward: Callable[[Iterator[Microbatch], Any], tuple[Any, Callable[..., Any]]]
    raise_alike: Callable[[], None] = _nothing_to_raise
    """Every rank must call it after a pass with a way back, before gradients are used: raises on all ranks alike."""

    def __call__(self, rows: Iterator[Microbatch], model: Any) -> tuple[Any, Callable[..., Any]]:
        """As Megatron's schedules call it: takes a microbatch, returns the output and the loss still to be taken."""
        return self.forward(rows, model)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchResult:
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


def loss_step(objective: Objective, device: torch.device) -> MicrobatchStep:
    """Log-probs, and the policy's loss."""
    words = _Words(objective.temperature, entropy_gradient=objective.train.entropy_coef > 0)

    def loss(row: Microbatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        logprobs_R, entropies_R = output
        return *objective.loss(row, logprobs_R, entropies_R), logprobs_R

    custom = objective.custom
    return _step(words, device, loss, custom.raise_alike if isinstance(custom, CheckedLoss) else _nothing_to_raise)


def logprob_step(temperature: float, device: torch.device) -> MicrobatchStep:
    """Log-probs only."""

    def loss(row: Microbatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        return output[0].sum(), {}, output[0]  # the schedule wants a loss; there is no way back

    return _step(_Words(temperature, entropy_gradient=False), device, loss)


def value_loss_step(objective: ValueObjective, head: nn.Linear | None, device: torch.device) -> MicrobatchStep:
    """Values, and the critic's loss."""

    def loss(row: Microbatch, values_R: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        return *objective.loss(row, values_R), values_R

    return _step(_Values(head), device, loss)


def value_step(head: nn.Linear | None, device: torch.device) -> MicrobatchStep:
    """Values only."""

    def loss(row: Microbatch, values_R: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        return values_R.sum(), {}, values_R

    return _step(_Values(head), device, loss)


def _step(
    reader: "_Words | _Values",
    device: torch.device,
    loss: Callable[[Microbatch, Any], tuple[Tensor, dict[str, Tensor], Tensor]],
    raise_alike: Callable[[], None] = _nothing_to_raise,
) -> MicrobatchStep:
    def finish(row: Microbatch, output: Any) -> tuple[Tensor, Tensor, MicrobatchResult]:
        value, sums, told_R = loss(row, output)
        # Megatron would divide by this number of tokens; the loss has its scale already.
        no_tokens = torch.zeros((), dtype=torch.int, device=value.device)
        return value, no_tokens, MicrobatchResult(row=row, told_R=told_R.detach(), sums=sums)

    def forward(rows: Iterator[Microbatch], model: Any) -> tuple[Any, Callable[..., Any]]:
        row = next(rows)
        return _run_model(model, row, reader, device), partial(finish, row)

    return MicrobatchStep(forward=forward, raise_alike=raise_alike)


def _run_model(model: Any, row: Microbatch, reader: "_Words | _Values", device: torch.device) -> Any:
    """What ``reader`` makes of the hidden states from which each response token of ``row`` is predicted.

    That is on the last pipeline stage; on the others it is what the next stage goes on with.
    """
    group = parallel_state.get_context_parallel_group()
    part = part_of(row, group.rank(), group.size())
    positions_T = torch.from_numpy(row.positions_T[part.places_T]).to(device)
    rotary = model.module.rotary_angles(positions_T)
    return model(
        torch.from_numpy(row.token_ids_T[part.places_T]).to(device).unsqueeze(0),
        positions_T.unsqueeze(0),
        None,
        packed_seq_params=packed_row(row, device, rotary, group.rank(), group.size()),
        output_processor=reader,
        output_processor_context=_Wanted(
            sources_M=torch.from_numpy(part.sources_M).to(device),
            targets_M=torch.from_numpy(row.targets_R[part.mine_M]).to(device),
            mine_M=torch.from_numpy(part.mine_M).to(device),
            count=len(row.targets_R),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """The response tokens that this context-parallel rank predicts."""

    sources_M: Tensor
    """Places among the rank's tokens at which each is predicted."""
    targets_M: Tensor
    mine_M: Tensor
    """Their places among all response tokens of the row."""
    count: int
    """Of all response tokens of the row."""

    def everyones(self, values_M: Tensor) -> Tensor:
        """With those of the other context-parallel ranks, which have no gradient here: they have it there."""
        group = parallel_state.get_context_parallel_group()
        if group.size() == 1:
            return values_M
        values_R = values_M.new_zeros(self.count).index_copy(0, self.mine_M, values_M.detach())
        dist.all_reduce(values_R, group=group)
        return values_R.index_copy(0, self.mine_M, values_M)


class _Words:
    """In the place of GPTModel's output: log-prob and entropy of every response token.  Prompts get no logits."""

    def __init__(self, temperature: float, *, entropy_gradient: bool) -> None:
        self._temperature, self._entropy_gradient = temperature, entropy_gradient

    def __call__(
        self, *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, context: _Wanted, **unused: Any
    ) -> tuple[Tensor, Tensor]:
        # Each tensor-parallel rank finds the gradient that comes through its words; together they are the gradient.
        hidden_MH = _hidden(hidden_states, context, sums_gradients=True)
        logprobs_M, entropies_M = token_logprobs(
            hidden_MH,
            output_layer.weight if output_weight is None else output_weight,
            context.targets_M,
            self._temperature,
            parallel_state.get_tensor_model_parallel_group(),
            entropy_gradient=self._entropy_gradient,
        )
        return context.everyones(logprobs_M), context.everyones(entropies_M)


class _Values:
    """In the place of GPTModel's output: the critic's value before every response token, in float32."""

    def __init__(self, head: nn.Linear | None) -> None:
        self._head = head

    def __call__(self, *, hidden_states: Tensor, context: _Wanted, **unused: Any) -> Tensor:
        assert self._head is not None, "the last pipeline stage has the head"
        hidden_MH = _hidden(hidden_states, context, sums_gradients=False)  # all tensor-parallel ranks do the same
        values_M1 = nn.functional.linear(hidden_MH.float(), self._head.weight.float(), self._head.bias.float())
        return context.everyones(values_M1.squeeze(1))


def _hidden(hidden_states: Tensor, wanted: _Wanted, *, sums_gradients: bool) -> Tensor:
    """The hidden states from which response tokens are predicted; tensor-parallel ranks have a part of the row each."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=sums_gradients)
    return hidden_states.squeeze(1).index_select(0, wanted.sources_M)
