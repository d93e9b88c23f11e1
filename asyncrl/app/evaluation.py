"""The sets of held-out prompts of a run: read, checked, and given a sampler each."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.app.rewards import check_rows
from asyncrl.config import RewardConfig, RunConfig
from asyncrl.config.areas.ranges import must, refuse
from asyncrl.config.derived import skip_special_tokens
from asyncrl.config.eval_sets import EvalSet, eval_sets, longest_held_out
from asyncrl.data.prompts import load_held_out
from asyncrl.data.rows import FILE_KEYS, HELD_OUT_KEYS
from asyncrl.data.tokenizer import TextTokenizer
from asyncrl.errors import ConfigError, DataError
from asyncrl.pipeline.evaluation import HeldOutSet
from asyncrl.pipeline.sampling.sampler import Sampler
from asyncrl.protocols import RewardFn
from asyncrl.rewards.final_answers import final_answer_of
from asyncrl.types import Prompt, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSet:
    """A set of held-out prompts that was read, with its reward."""

    settings: EvalSet
    prompts: tuple[Prompt, ...]
    tokenizer: TextTokenizer
    """The tokenizer whose decoded texts the reward grades."""
    reward: RewardFn


def checked_sets(
    run: RunConfig, tokenizer: TextTokenizer, max_positions: int, reward_of: Callable[[RewardConfig], RewardFn]
) -> tuple[CheckedSet, ...]:
    """Read the prompts of every set and find its reward.

    Raises DataError or PluginError, and ConfigError if a prompt and its response exceed ``max_positions`` tokens.
    """
    numbers = run.episodes.has_episodes
    return tuple(
        CheckedSet(
            settings=each,
            prompts=_prompts(each, tokenizer, max_positions, reward := reward_of(each.reward), takes_numbers=numbers),
            tokenizer=tokenizer.skipping(skip_special_tokens(run.rollout, each.reward)),
            reward=reward,
        )
        for each in eval_sets(run)
    )


def check_eval_rewards(run: RunConfig, reward_of: Callable[[RewardConfig], RewardFn]) -> None:
    """Find the reward of every set.  Raises PluginError."""
    for each in eval_sets(run):
        reward_of(each.reward)


def check_eval_lengths(run: RunConfig, max_positions: int) -> None:
    """Raise ConfigError if a set's limits exceed ``max_positions``, or if its minimum length cannot be enforced."""
    there = f"tokens, the model has {max_positions} positions (max-position-embeddings)"
    sets = eval_sets(run) if run.evaluation.eval_interval is not None else ()
    lines = []
    for each in sets:
        length, total = each.max_response_len, longest_held_out(run, each)
        name = f"{each.label}: max_response_len" if each.origin else "eval-max-response-len"
        known = total - length
        text = f"{name} {length} {there}, and a prompt must have room as well"
        text = f"prompts of up to {known} + {name} {length} = {total} {there}" if known else text
        lines += must(total <= max_positions, text)
    refuse(dict.fromkeys([*lines, *_without_end(run, sets)]))


def _without_end(run: RunConfig, sets: Sequence[EvalSet]) -> list[str]:
    """One line per set whose minimum length needs the tokenizer's end token, which the checkpoint does not name."""
    named = [each for each in sets if each.min_new_tokens]
    if not named or _names_end(run.model.hf_checkpoint):
        return []
    why = "SGLang needs the eos_token in the checkpoint's tokenizer_config.json, which has none"
    return [f"{each.label}: min_new_tokens {each.min_new_tokens}: {why}; leave it out" for each in named]


def _names_end(checkpoint: Path) -> bool:
    """Whether the tokenizer's files name an end token; older checkpoints have it in the second file."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            if json.loads((checkpoint / name).read_text(encoding="utf-8")).get("eos_token") is not None:
                return True
        except (OSError, ValueError, AttributeError):
            continue
    return False


def _prompts(
    each: EvalSet, tokenizer: TextTokenizer, max_positions: int, reward: RewardFn, *, takes_numbers: bool
) -> tuple[Prompt, ...]:
    prompts = load_held_out(
        each.path,
        each.data,
        tokenizer,
        takes_numbers=takes_numbers,
        key_settings=FILE_KEYS if each.origin else HELD_OUT_KEYS,
    )
    limit = each.max_prompt_len
    kept = tuple(prompt for prompt in prompts if limit is None or len(prompt.token_ids) <= limit)
    if not kept:
        raise DataError(f"{each.label}: no prompt of {each.path} has at most max_prompt_len {limit} tokens")
    if len(kept) < len(prompts):
        logger.info("%s: %d prompts, %d longer ones left out", each.label, len(kept), len(prompts) - len(kept))
    longest = max(kept, key=lambda prompt: len(prompt.token_ids))
    total = len(longest.token_ids) + each.max_response_len
    if total > max_positions:
        raise ConfigError(
            f"{each.label}: the prompt of row {longest.row} has {len(longest.token_ids)} tokens, with max_response_len "
            f"{each.max_response_len} that is {total}; the model has {max_positions} positions "
            "(max-position-embeddings); give eval-max-prompt-len"
        )
    if each.metadata:
        kept = tuple(replace(prompt, metadata={**prompt.metadata, **each.metadata}) for prompt in kept)
    check_rows(reward, kept, each.label)
    return kept


def held_out_sets(
    checked: Sequence[CheckedSet],
    end_tokens: tuple[int, ...],
    sampler: Callable[[SamplingParams, RewardFn, TextTokenizer], Sampler],
) -> tuple[HeldOutSet, ...]:
    """Return the sets as the pipeline needs them; ``sampler`` makes the sampler of each."""
    return tuple(
        HeldOutSet(
            name=each.settings.name,
            prompts=each.prompts,
            samples_per_prompt=each.settings.n_samples_per_eval_prompt,
            sampler=sampler(eval_sampling(each.settings, end_tokens), each.reward, each.tokenizer),
            final_answer=_final_answer_of(each.settings.reward),
            pass_threshold=each.settings.pass_threshold,
        )
        for each in checked
    )


def eval_sampling(settings: EvalSet, end_tokens: tuple[int, ...]) -> SamplingParams:
    """Return the sampling settings of one set; ``end_tokens`` are the model's."""
    return SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_new_tokens=settings.max_response_len,
        stop=settings.stop,
        stop_token_ids=(*end_tokens, *settings.stop_token_ids),
        min_new_tokens=settings.min_new_tokens,
        repetition_penalty=settings.repetition_penalty,
    )


def _final_answer_of(reward: RewardConfig) -> Callable[[Prompt, str], str | None]:
    return final_answer_of(reward.rm_type, is_function=reward.custom_rm_path is not None)
