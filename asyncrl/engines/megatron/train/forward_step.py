"""One microbatch through a model: log-probs or values, the loss, and the numbers to report.

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
from asyncrl.engines.megatron.model.known_ids import KnownIds, known_ids
from asyncrl.engines.megatron.model.logprobs import token_logprobs
from asyncrl.engines.megatron.model.packing import Floats, Microbatch, part_of
from asyncrl.engines.megatron.model.routing import RoutingReplay
from asyncrl.engines.megatron.setup.transfer import on_device
from asyncrl.engines.megatron.train.custom_loss import CheckedLoss
from asyncrl.engines.megatron.train.custom_tis import CheckedTis
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


def _nothing() -> None:
    """Do nothing: there is no failure for ranks to share, and nothing to forget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchStep:
    """The work of a pass on each microbatch."""

    forward: Callable[[Iterator[Microbatch], Any], tuple[Any, Callable[..., Any]]]
    raise_alike: Callable[[], None] = _nothing
    """The check of a forward and backward pass.  Every rank must call it before gradients are used; it raises on all
    ranks alike."""

    reset: Callable[[], None] = _nothing
    """Forgets what a failed pass has left, before the pass is repeated."""

    def __call__(self, rows: Iterator[Microbatch], model: Any) -> tuple[Any, Callable[..., Any]]:
        """Run the next microbatch of ``rows``, with the signature that Megatron's schedules call.

        Returns the model's output, and the function that computes the loss from it.
        """
        return self.forward(rows, model)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchResult:
    """The result of one microbatch."""

    row: Microbatch
    told_R: Tensor
    """Log-probs or values of the response tokens; 0 at observations."""
    sums: dict[str, Tensor]
    """Float64 sums over the trained tokens by metric name, and the share of the update's loss as ``train/loss``.  Empty
    without an objective."""

    def by_sample(self) -> dict[int, Floats]:
        """Split ``told_R`` by sample, keyed by index in the batch."""
        rows: Sequence[Tensor] = ()
        if self.row.lengths:
            rows = self.told_R.cpu().split(list(self.row.lengths))  # type: ignore[no-untyped-call]
        return {index: row.numpy() for index, row in zip(self.row.indices, rows, strict=True)}


def loss_step(objective: Objective, device: torch.device, replay: RoutingReplay | None = None) -> MicrobatchStep:
    """Build the step that computes log-probs and the policy's loss; with ``replay``, under the samples' routes."""
    words = _Words(
        objective.temperature,
        entropy_gradient=objective.train.entropy_coef > 0,
        wants_top=objective.train.use_score_centering,
    )

    def loss(row: Microbatch, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        logprobs_R, entropies_R, top_I = output
        return *objective.loss(row, logprobs_R, entropies_R, top_I), logprobs_R

    # A user's loss and correction keep their first failure in one place, so one of them raises for both.
    checked = [each for each in (objective.custom, objective.tis) if isinstance(each, CheckedLoss | CheckedTis)]
    return _step(words, device, loss, checked[0].raise_alike if checked else _nothing, replay)


def logprob_step(temperature: float, device: torch.device, replay: RoutingReplay | None = None) -> MicrobatchStep:
    """Build the step that computes log-probs only; with ``replay``, under the samples' routes."""

    def loss(row: Microbatch, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        return output[0].sum(), {}, output[0]  # the schedule needs a loss; there is no backward pass

    return _step(_Words(temperature, entropy_gradient=False), device, loss, replay=replay)


def value_loss_step(objective: ValueObjective, head: nn.Linear | None, device: torch.device) -> MicrobatchStep:
    """Build the step that computes values and the critic's loss."""

    def loss(row: Microbatch, values_R: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        return *objective.loss(row, values_R), values_R

    return _step(_Values(head), device, loss)


def value_step(head: nn.Linear | None, device: torch.device) -> MicrobatchStep:
    """Build the step that computes values only."""

    def loss(row: Microbatch, values_R: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        return values_R.sum(), {}, values_R

    return _step(_Values(head), device, loss)


def _step(
    reader: "_Words | _Values",
    device: torch.device,
    loss: Callable[[Microbatch, Any], tuple[Tensor, dict[str, Tensor], Tensor]],
    raise_alike: Callable[[], None] = _nothing,
    replay: RoutingReplay | None = None,
) -> MicrobatchStep:
    def finish(row: Microbatch, output: Any) -> tuple[Tensor, Tensor, MicrobatchResult]:
        value, sums, told_R = loss(row, output)
        # Megatron would divide by this number of tokens; the loss is already scaled.
        no_tokens = torch.zeros((), dtype=torch.int, device=value.device)
        return value, no_tokens, MicrobatchResult(row=row, told_R=told_R.detach(), sums=sums)

    def forward(rows: Iterator[Microbatch], model: Any) -> tuple[Any, Callable[..., Any]]:
        row = next(rows)
        return _run_model(model, row, reader, device, replay), partial(finish, row)

    reset = _nothing if replay is None else replay.rewinding()
    return MicrobatchStep(forward=forward, raise_alike=raise_alike, reset=reset)


def _run_model(
    model: Any, row: Microbatch, reader: "_Words | _Values", device: torch.device, replay: RoutingReplay | None
) -> Any:
    """Apply ``reader`` to the hidden states from which the response tokens of ``row`` are predicted.

    Returns its result on the last pipeline stage, and the next stage's input on the others.
    """
    group = parallel_state.get_context_parallel_group()
    part = part_of(row, group.rank(), group.size())
    routes = None if replay is None else replay.row_routes(row, part.places_T, device)
    positions_T = on_device(row.positions_T[part.places_T], device)
    rotary = model.module.rotary_angles(positions_T)
    return model(
        on_device(row.token_ids_T[part.places_T], device).unsqueeze(0),
        positions_T.unsqueeze(0),
        None,
        packed_seq_params=packed_row(row, device, rotary, group.rank(), group.size(), routes),
        output_processor=reader,
        output_processor_context=_Wanted(
            sources_M=on_device(part.sources_M, device),
            targets_M=on_device(row.targets_R[part.mine_M], device),
            mine_M=on_device(part.mine_M, device),
            count=len(row.targets_R),
            ids=known_ids(row, part, device, wants_top=reader.wants_top),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """The response tokens that this context-parallel rank predicts, without observations."""

    sources_M: Tensor
    """Indices among the rank's tokens at which each is predicted."""
    targets_M: Tensor
    mine_M: Tensor
    """Their indices among all response tokens of the row."""
    count: int
    """Number of response tokens of the row, over all context-parallel ranks."""
    ids: KnownIds | None
    """Further ids whose log-probs are wanted; None: there are none."""

    def everyones_top(self, values_N: Tensor) -> Tensor:
        """Merge the log-probs of likeliest ids with those of the other context-parallel ranks."""
        assert self.ids is not None, "there are no likeliest ids"
        return _merged(values_N, self.ids.places_I, self.ids.num_top)

    def everyones(self, values_M: Tensor) -> Tensor:
        """Merge ``values_M`` with the values of the other context-parallel ranks; observations get 0.

        The others' values have no gradient here: they have it on the ranks that computed them.
        """
        return _merged(values_M, self.mine_M, self.count)


def _merged(values: Tensor, places: Tensor, count: int) -> Tensor:
    """Put this rank's values at ``places`` among ``count`` of all context-parallel ranks, with those of the others."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1 and len(values) == count:
        return values
    whole = values.new_zeros(count).index_copy(0, places, values.detach())
    if group.size() > 1:
        dist.all_reduce(whole, group=group)
    return whole.index_copy(0, places, values)


class _Words:
    """The output of GPTModel, replaced by log-prob and entropy of every response token, and log-probs of likeliest ids.

    A token that was drawn among some ids only has the log-prob and the entropy over these ids.
    Prompts and observations get no logits; log-prob and entropy of observations are 0.
    """

    def __init__(self, temperature: float, *, entropy_gradient: bool, wants_top: bool = False) -> None:
        self._temperature, self._entropy_gradient = temperature, entropy_gradient
        self.wants_top = wants_top

    def __call__(
        self, *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, context: _Wanted, **unused: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Each tensor-parallel rank has the gradient through its part of the vocabulary; their sum is the gradient.
        hidden_MH = _hidden(hidden_states, context, sums_gradients=True)
        found = token_logprobs(
            hidden_MH,
            output_layer.weight if output_weight is None else output_weight,
            context.targets_M,
            self._temperature,
            parallel_state.get_tensor_model_parallel_group(),
            entropy_gradient=self._entropy_gradient,
            further=None if context.ids is None else context.ids.further,
        )
        if context.ids is None:
            nothing = found.logprobs_R.new_zeros(0)
            return context.everyones(found.logprobs_R), context.everyones(found.entropies_R), nothing
        logprobs_M, entropies_M, top_N = context.ids.read(found)
        return context.everyones(logprobs_M), context.everyones(entropies_M), context.everyones_top(top_N)


class _Values:
    """The output of GPTModel, replaced by the critic's value before every response token, in float32."""

    wants_top = False

    def __init__(self, head: nn.Linear | None) -> None:
        self._head = head

    def __call__(self, *, hidden_states: Tensor, context: _Wanted, **unused: Any) -> Tensor:
        assert self._head is not None, "the last pipeline stage must have the value head"
        hidden_MH = _hidden(hidden_states, context, sums_gradients=False)  # all tensor-parallel ranks compute the same
        values_M1 = nn.functional.linear(hidden_MH.float(), self._head.weight.float(), self._head.bias.float())
        return context.everyones(values_M1.squeeze(1))


def _hidden(hidden_states: Tensor, wanted: _Wanted, *, sums_gradients: bool) -> Tensor:
    """Select the hidden states from which response tokens are predicted.

    Tensor-parallel ranks have a part of the row each, so the row is gathered first.
    """
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=sums_gradients)
    return hidden_states.squeeze(1).index_select(0, wanted.sources_M)
