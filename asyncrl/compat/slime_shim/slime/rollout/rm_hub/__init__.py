"""Rewards by path and by type."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from asyncrl.errors import plainly
from asyncrl.rewards.graders.boxed import READ_BOXES

from ...utils.http_utils import post
from ...utils.misc import load_function
from .deepscaler import get_deepscaler_rule_based_reward
from .f1 import f1_score
from .gpqa import compute_gpqa_reward
from .math_dapo_utils import compute_score as compute_score_dapo
from .math_utils import extract_answer as extract_boxed_answer
from .math_utils import grade_answer_verl

__all__ = [
    "async_rm",
    "batched_async_rm",
    "compute_gpqa_reward",
    "compute_score_dapo",
    "extract_boxed_answer",
    "f1_score",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
    "remote_rm",
]


async def async_rm(args: Any, sample: Any, **kwargs: Any) -> Any:
    """Return the reward of one sample: of the sample's function, of ``--custom-rm-path``, or of the type of reward."""
    path = sample.custom_rm_path or args.custom_rm_path
    if path:
        return await load_function(path)(args, sample, **kwargs)
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    name = (metadata.get("rm_type") or args.rm_type or "").strip()
    response = sample.response
    if name.startswith("boxed_"):
        name = name.removeprefix("boxed_")
        response = response if name in READ_BOXES else extract_boxed_answer(response) or ""
    if name == "remote_rm":
        return await remote_rm(args, sample)
    return _of_type(name, response, sample.label, metadata)


async def batched_async_rm(args: Any, samples: Sequence[Any], **kwargs: Any) -> Any:
    """Return the rewards of several samples; the function of ``--custom-rm-path`` gets all of them at once."""
    if args.custom_rm_path is not None:
        return await load_function(args.custom_rm_path)(args, samples, **kwargs)
    with plainly():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(async_rm(args, sample, **kwargs)) for sample in samples]
    return [task.result() for task in tasks]


async def remote_rm(args: Any, sample: Any, max_retries: int = 10) -> Any:
    """Return the answer of the service at ``--rm-url``."""
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    return await post(args.rm_url, payload, max_retries=max_retries)


def _of_type(name: str, response: str, label: Any, metadata: dict[str, Any]) -> Any:
    match name:
        case "deepscaler":
            return get_deepscaler_rule_based_reward(response, label)
        case "dapo":
            return compute_score_dapo(response, label)
        case "math":
            return 1 if grade_answer_verl(response, label) else 0
        case "f1":
            return f1_score(response, label)[0]
        case "gpqa":
            return compute_gpqa_reward(response, label, metadata=metadata)
        case "random":
            return random.randint(0, 1)
        case "":
            raise NotImplementedError("there is no type of reward: give --rm-type or --custom-rm-path")
    raise NotImplementedError(f"--rm-type {name} is not known inside functions of slime's shape")
