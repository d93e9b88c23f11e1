"""Generation of single samples: the state of the process, one turn, and one turn with its reward."""

import asyncio
import copy
import inspect
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from asyncrl.errors import plainly

from ..utils.http_utils import get, get_rollout_num_engines, post
from ..utils.misc import SingletonMeta, load_function
from ..utils.processing_utils import load_processor, load_tokenizer
from ..utils.types import Sample
from .rm_hub import async_rm, batched_async_rm
from .sample_hooks import apply_rollout_sample_hooks

__all__ = [
    "GenerateState",
    "abort",
    "async_rm",
    "batched_async_rm",
    "eval_rollout",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get",
    "get_model_url",
    "load_function",
    "post",
]

_NO_LOOP = (
    "asyncrl has no {name}: its controller decides when samples start; name the function that generates one sample "
    "with --custom-generate-function-path instead of --rollout-function-path"
)


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """Return the address of a named model, or of the rollout engines."""
    routers = getattr(args, "sglang_model_routers", None) or {}
    host, port = routers.get(model_name, (args.sglang_router_ip, args.sglang_router_port))
    return f"http://{host}:{port}{endpoint}"


class GenerateState(metaclass=SingletonMeta):
    """The state of the process; the first call's ``args`` stay."""

    def __init__(self, args: Any) -> None:
        """Load the tokenizer of ``args.hf_checkpoint``."""
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
        self.processor = load_processor(args.hf_checkpoint, trust_remote_code=True)
        self.semaphore = asyncio.Semaphore(max(1, args.sglang_server_concurrency * get_rollout_num_engines(args)))
        self.sampling_params: dict[str, Any] = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids,
            "skip_special_tokens": args.rollout_skip_special_tokens,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        self.group_sampling_seeds = [args.rollout_seed + place for place in range(args.n_samples_per_prompt)]
        self.dp_rank = 0
        self.reset()

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Yield the data-parallel rank, which the engines choose themselves."""
        yield self.dp_rank

    def reset(self) -> None:
        """Forget what is in progress.  ``aborted`` stays False: functions never see an abort."""
        self.remaining_batch_size = 0
        self.pendings: set[Any] = set()
        self.aborted = False

    def submit_generate_tasks(self, samples: Any) -> NoReturn:
        """Raise NotImplementedError."""
        raise NotImplementedError(_NO_LOOP.format(name="GenerateState.submit_generate_tasks"))


def _prepare_prompt_ids(sample: Any, tokenizer: Any, processor: Any = None) -> Any:
    return sample.tokens or tokenizer.encode(sample.prompt, add_special_tokens=False)


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Generate one turn behind the sample's tokens, or behind its prompt if it has none.

    ``max_new_tokens`` in ``sampling_params`` is lowered by the response that is there.
    """
    if args.ci_test:
        assert isinstance(sample.prompt, str)
    if sample.status not in (Sample.Status.PENDING, Sample.Status.ABORTED):
        raise AssertionError(f"the sample's status is {sample.status}, not pending or aborted")
    state = GenerateState(args)
    prompt_ids = _prepare_prompt_ids(sample, state.tokenizer, state.processor)
    sampling_params["max_new_tokens"] -= sample.response_length
    if sampling_params["max_new_tokens"] < 0:
        raise AssertionError(f"max_new_tokens is {sampling_params['max_new_tokens']}, below 0")
    if sampling_params["max_new_tokens"] == 0:
        sample.status = Sample.Status.TRUNCATED
        return sample
    payload = {"sampling_params": sampling_params, "return_logprob": True, "input_ids": list(prompt_ids)}
    if not sample.tokens:
        sample.tokens = list(prompt_ids)
    output = await post(get_model_url(args, ""), payload, headers=_headers(args, sample))
    drawn = output["meta_info"].get("output_token_logprobs") or []
    sample.append_response_tokens(
        args,
        tokens=[each[1] for each in drawn],
        log_probs=[each[0] for each in drawn],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    return sample


def _headers(args: Any, sample: Any) -> dict[str, str] | None:
    is_sticky = sample.session_id and getattr(args, "router_policy", None) == "consistent_hashing"
    return {"X-SMG-Routing-Key": sample.session_id} if is_sticky else None


async def generate_and_rm(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Generate one sample, or several, with their rewards; a finished sample is returned as it is."""
    if not isinstance(sample, list) and sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        return sample
    async with GenerateState(args).semaphore:
        path = getattr(sample, "generate_function_path", None) or args.custom_generate_function_path
        function = generate if path is None else load_function(path)
        named = "evaluation" in inspect.signature(function).parameters
        sample = await function(args, sample, sampling_params, **({"evaluation": evaluation} if named else {}))
    sample = await apply_rollout_sample_hooks(args, sample, evaluation=evaluation)
    if not args.group_rm:
        await add_rewards(args, sample)
    return sample


async def add_rewards(args: Any, found: Any) -> None:
    """Set the missing rewards of a sample, or of the list of samples of one episode; of none if one is aborted."""
    if not isinstance(found, list):
        if found.status != Sample.Status.ABORTED and found.reward is None:
            found.reward = await async_rm(args, found)
        return
    missing = [sample for sample in found if sample.reward is None]
    if missing and not any(sample.status == Sample.Status.ABORTED for sample in found):
        rewards = await batched_async_rm(args, missing)
        for sample, reward in zip(missing, rewards, strict=True):
            sample.reward = reward


async def generate_and_rm_group(
    args: Any, group: list[Any], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """Generate all samples of a group, each with a copy of the settings."""
    for sample in group:
        sample.session_id = sample.session_id or str(uuid.uuid4())
    with plainly():
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(generate_and_rm(args, sample, _settings(args, sampling_params, place), evaluation))
                for place, sample in enumerate(group)
            ]
    found = [task.result() for task in running]
    if args.group_rm:
        for sample, reward in zip(found, await batched_async_rm(args, found), strict=True):
            sample.reward = reward
    return found


def _settings(args: Any, sampling_params: dict[str, Any], place: int) -> dict[str, Any]:
    is_seeded = getattr(args, "sglang_enable_deterministic_inference", False)
    seed = {"sampling_seed": args.rollout_seed + place} if is_seeded else {}
    return copy.copy(sampling_params) | seed


def generate_rollout(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise NotImplementedError."""
    raise NotImplementedError(_NO_LOOP.format(name="generate_rollout"))


async def generate_rollout_async(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise NotImplementedError."""
    raise NotImplementedError(_NO_LOOP.format(name="generate_rollout_async"))


async def eval_rollout(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise NotImplementedError."""
    raise NotImplementedError(_NO_LOOP.format(name="eval_rollout"))


async def abort(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise NotImplementedError."""
    raise NotImplementedError(_NO_LOOP.format(name="abort"))
