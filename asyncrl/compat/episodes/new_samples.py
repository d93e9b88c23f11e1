"""The Sample with which a function of slime's shape begins, and its sampling parameters."""

import copy
from typing import Any

from asyncrl.compat.slime_sample import Sample, sample_of
from asyncrl.compat.slime_types import SlimeArgs
from asyncrl.episodes import EpisodeStart
from asyncrl.rollouts.interfaces import EpisodeCall


def new_sample(call: EpisodeCall) -> Sample:
    """Return the sample of an episode: pending, with the prompt and without tokens."""
    start, sample = call.start, sample_of(call.start.prompt)
    sample.group_index, sample.index = group_index_of(start), index_of(start)
    sample.session_id = call.address.key  # a file that sends it as X-SMG-Routing-Key names its episode with it
    return sample


def group_index_of(start: EpisodeStart) -> int:
    """Return the number of the group, or of the row in an evaluation."""
    return start.prompt.row if start.group_id is None else start.group_id


def index_of(start: EpisodeStart) -> int:
    """Return the number of the sample, counted over all groups, or over the rows of an evaluation."""
    return group_index_of(start) * start.group_size + start.index


def sampling_params(start: EpisodeStart, args: SlimeArgs) -> dict[str, Any]:
    """Return the settings of one turn under SGLang's names, as slime has them."""
    sampling = start.sampling
    found: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if sampling.min_new_tokens:
        found["min_new_tokens"] = sampling.min_new_tokens
    if sampling.repetition_penalty != 1.0:
        found["repetition_penalty"] = sampling.repetition_penalty
    if getattr(args, "sglang_enable_deterministic_inference", False):
        found["sampling_seed"] = args.rollout_seed + start.index
    return found | copy.deepcopy(dict(sampling.extra))
