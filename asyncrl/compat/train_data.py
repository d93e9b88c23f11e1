"""slime's train data: the dictionary of columns that a user's conversion returns, read into a batch."""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncrl.compat.slime_views import carry_view
from asyncrl.errors import HookFailed
from asyncrl.hooks.changes import masked, name_of_sample, number, with_samples
from asyncrl.types import Batch, FinishReason, Floats, Sample, ScoredGroup, ScoredSample

READ = ("rewards", "raw_reward", "loss_masks", "rollout_log_probs", "truncated")
"""Columns that change the batch."""
CHECKED = ("tokens", "response_lengths", "sample_indices", "rollout_ids")
"""Columns that must agree with the batch."""
IGNORED = (
    *("total_lengths", "rollout_mask_sums", "source_names", "round_number"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts"),
)
"""Columns that follow from others, that only slime's reports use, or that stay as the engines returned them."""


def converted(batch: Batch, data: Mapping[str, Any], indices: Sequence[int | None]) -> Batch:
    """Return ``batch`` with the columns of ``data``; ``indices`` are slime's indices of the samples, in batch order.

    Rows are in batch order, or in the order of ``sample_indices``.  Raises HookFailed for a column that asyncrl cannot
    train with, and for one that does not fit the batch.
    """
    unknown = sorted(map(str, data.keys() - {*READ, *CHECKED, *IGNORED}))
    if unknown:
        raise HookFailed(
            f"returned the keys {', '.join(unknown)}, which asyncrl cannot train with; it reads "
            f"{', '.join((*CHECKED, *READ))}"
        )
    columns = _ordered({name: data[name] for name in (*CHECKED, *READ) if data.get(name) is not None}, indices)
    pairs = [(group, scored) for group in batch.groups for scored in group.samples]
    _check_rollouts(columns.get("rollout_ids"), [(group.group_id, scored.sample.rollout) for group, scored in pairs])
    return with_samples(
        batch,
        [
            _changed(group, scored, {name: column[place] for name, column in columns.items()})
            for place, (group, scored) in enumerate(pairs)
        ],
    )


def _ordered(data: Mapping[str, Any], indices: Sequence[int | None]) -> dict[str, list[Any]]:
    """Return each column in batch order."""
    columns = {name: list(column) for name, column in data.items()}
    for name, column in columns.items():
        if len(column) != len(indices):
            raise HookFailed(
                f"key {name} has {len(column)} entries for {len(indices)} samples; leave a sample out by its loss mask"
            )
    given = columns.get("sample_indices")
    if given is None or given == list(indices):
        return columns
    if len(set(indices)) < len(indices):
        raise HookFailed("key sample_indices is in another order, and several samples of an episode share an index")
    places = {index: place for place, index in enumerate(given)}
    missing = [index for index in indices if index not in places]
    if missing:
        raise HookFailed(f"key sample_indices lacks sample {missing[0]} of the batch")
    return {name: [column[places[index]] for index in indices] for name, column in columns.items()}


def _check_rollouts(ids: Sequence[Any] | None, rollouts: Sequence[tuple[int, int]]) -> None:
    """Raise HookFailed unless the samples with equal ids are those of one episode."""
    pairs = {(given, rollout) for given, rollout in zip(ids or (), rollouts, strict=False) if given is not None}
    if len({given for given, _ in pairs}) != len(pairs) or len({rollout for _, rollout in pairs}) != len(pairs):
        raise HookFailed("key rollout_ids must have one value per episode: its samples share one rollout")


def _changed(group: ScoredGroup, scored: ScoredSample, row: Mapping[str, Any]) -> ScoredSample:
    name = name_of_sample(group, scored.sample.index)
    _check_tokens(group, scored, row, name)
    if "loss_masks" in row:
        scored = masked(scored, _plain(row["loss_masks"]), name)
    if "rewards" in row:
        scored = replace(scored, outcome=number(row["rewards"], f"the entry of rewards for {name}"))
    if "raw_reward" in row:
        scored = replace(scored, reward=number(row["raw_reward"], f"the entry of raw_reward for {name}"))
    return _with_sample(scored, row, name)


def _check_tokens(group: ScoredGroup, scored: ScoredSample, row: Mapping[str, Any], name: str) -> None:
    length = len(scored.sample.token_ids)
    if "response_lengths" in row and row["response_lengths"] != length:
        raise HookFailed(f"{name} has {length} response tokens, response_lengths says {row['response_lengths']}")
    before = group.prompt.token_ids if scored.sample.prompt_ids is None else scored.sample.prompt_ids
    if "tokens" in row and tuple(_plain(row["tokens"])) != before + scored.sample.token_ids:
        raise HookFailed(
            f"the tokens of {name} are not those of its prompt and of the engines; leave tokens out by the loss mask"
        )


def _with_sample(scored: ScoredSample, row: Mapping[str, Any], name: str) -> ScoredSample:
    """Return the sample with other log-probs and another finish reason, if the row has some."""
    old = new = scored.sample
    if "rollout_log_probs" in row:
        logprobs = _logprobs(old, _plain(row["rollout_log_probs"]), name)
        new = new if logprobs == old.logprobs else replace(new, logprobs=logprobs)
    if "truncated" in row and bool(row["truncated"]) != (old.finish is FinishReason.LENGTH):
        new = replace(new, finish=FinishReason.LENGTH if row["truncated"] else FinishReason.STOP)
    if new is old:
        return scored
    carry_view(old, new)
    return replace(scored, sample=new)


def _logprobs(sample: Sample, given: Sequence[Any], name: str) -> Floats:
    """Return the column's log-probs of a sample, NaN only where they are unknown already.  Raises HookFailed."""
    if len(given) != len(sample.token_ids):
        raise HookFailed(f"{name} has {len(sample.token_ids)} response tokens, got {len(given)} rollout_log_probs")
    pairs = zip(given, sample.logprobs, strict=True)
    return array(
        "f",
        [
            old
            if math.isnan(old) and isinstance(new, float) and math.isnan(new)
            else number(new, f"a log-prob of {name}")
            for new, old in pairs
        ],
    )


def _plain(values: Any) -> list[Any]:
    return list(values.tolist() if hasattr(values, "tolist") else values)
