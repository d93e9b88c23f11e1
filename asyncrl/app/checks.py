"""The checks before anything expensive starts: they read every file and resolve every function of a run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asyncrl.app.resume import Start, find_start
from asyncrl.app.user_hooks import StepHooks, step_hooks, user_prompts
from asyncrl.capacity.layout import check_layout
from asyncrl.config import RunConfig, check_passthrough
from asyncrl.config.areas.ranges import must, refuse
from asyncrl.config.derived import longest_responses, weight_bytes
from asyncrl.config.resolved import flat
from asyncrl.data.end_tokens import end_tokens
from asyncrl.data.prompts import EndlessPrompts, load_held_out, load_prompts
from asyncrl.data.tokenizer import TextTokenizer, load_tokenizer
from asyncrl.engines.megatron.setup.settings import Resolver
from asyncrl.engines.sglang.server_flags import known_router_flags, known_server_flags
from asyncrl.engines.weight_sync.disk import check_disk
from asyncrl.errors import ConfigError
from asyncrl.hooks.prompt_source import UserPrompts
from asyncrl.models.overrides import overridden, server_changes
from asyncrl.models.shape import ModelShape, read_config, shape_of
from asyncrl.models.sizes import sent_bytes
from asyncrl.pipeline.evaluation import HeldOut
from asyncrl.plugins import KEEP, PICK, REWARD, load_custom, load_plugin, load_source
from asyncrl.protocols import KeepFn, PickFn, RewardFn
from asyncrl.rewards import BUILT_IN
from asyncrl.types import ScoredGroup

OVERRIDE_FLAG = "json-model-override-args"
"""The SGLang flag that overrides values of config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModel:
    """A model that the run can train, split and serve, from one reading of ``config.json``."""

    config: Mapping[str, Any]
    """The parsed ``config.json``."""
    shape: ModelShape
    """The shape in ``config``, with the run's shape flags applied."""
    server_flags: dict[str, str | bool]
    """The SGLang server's flags: the user's, and shape flags that override ``config.json``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A run whose files and functions exist and fit together."""

    run: RunConfig
    model: CheckedModel
    tokenizer: TextTokenizer
    end_tokens: tuple[int, ...]
    prompts: EndlessPrompts | UserPrompts
    start: Start
    held_out: HeldOut
    reward: RewardFn
    keep: KeepFn
    pick: PickFn | None
    hooks: StepHooks
    custom: Resolver | None
    """Finds the user's advantage and loss functions in the driver and in every rank; None without any."""

    @property
    def num_processes(self) -> int:
        """The number of trainer ranks and engines."""
        return self.run.cluster.num_trainer_ranks + self.run.cluster.num_engines


def check(run: RunConfig) -> Checked:
    """Read and resolve everything that the run names.  Raises ConfigError, DataError or PluginError."""
    check_flags(run)
    return check_files(run, check_model(run))


def check_files(run: RunConfig, model: CheckedModel) -> Checked:
    """Read and resolve everything but the model.  Raises ConfigError, DataError or PluginError."""
    custom = _custom(run)
    if run.train.update_weight_disk_dir is not None:
        check_disk(run.train.update_weight_disk_dir, sent_bytes(model.shape, weight_bytes(run.model)))
    tokenizer = load_tokenizer(run.model.hf_checkpoint)
    prompts = _prompts(run, tokenizer)
    return Checked(
        run=run,
        model=model,
        tokenizer=tokenizer,
        end_tokens=end_tokens(run.model.hf_checkpoint, model.config),
        prompts=prompts,
        start=find_start(run, prompts, model.shape),
        held_out=HeldOut(
            prompts={name: load_held_out(path, run.data, tokenizer) for name, path in run.evaluation.data_sets},
            samples_per_prompt=run.evaluation.n_samples_per_eval_prompt,
        ),
        reward=_reward(run),
        keep=_keep(run),
        pick=_pick(run),
        hooks=step_hooks(
            run.hooks, _plugin_args(run), prompts.get_samples if isinstance(prompts, UserPrompts) else None
        ),
        custom=custom,
    )


def check_model(run: RunConfig) -> CheckedModel:
    """Read ``config.json`` and check that the run can train, split and serve its model.  Raises ConfigError."""
    config = read_config(run.model.hf_checkpoint)
    shape = overridden(shape_of(config), run.shape)
    check_layout(shape, run.parallel, run.cluster.device)
    check_served(run.model.hf_checkpoint, shape, run.cluster.device)
    server_flags = _server_flags(run, config, shape)
    refuse(_too_long(run, shape))
    return CheckedModel(config=config, shape=shape, server_flags=server_flags)


def _too_long(run: RunConfig, shape: ModelShape) -> list[str]:
    """One line for each length above the number of positions, because SGLang refuses such requests."""
    limit, (response, held_out) = run.data.rollout_max_prompt_len, longest_responses(run)
    prompt = limit or 0
    there = f"tokens, the model has {shape.max_positions} positions (max-position-embeddings)"

    def line(name: str, length: int) -> str:
        if limit is None:
            return f"{name} {length} {there}, and a prompt must have room as well"
        return f"rollout-max-prompt-len {limit} + {name} {length} = {limit + length} {there}"

    return must(prompt + response <= shape.max_positions, line("rollout-max-response-len", response)) + must(
        held_out <= response or prompt + held_out <= shape.max_positions, line("eval-max-response-len", held_out)
    )


def check_served(checkpoint: Path, shape: ModelShape, device: str) -> None:
    """Raise ConfigError if SGLang cannot serve ``checkpoint`` on ``device``: 0.5.16 has no fp8 without a GPU."""
    if device == "cpu" and shape.fp8_block is not None:
        raise ConfigError(
            f"hf-checkpoint: {checkpoint} is in fp8, which SGLang serves on GPUs alone; make a copy that is not: "
            "python -m asyncrl.engines.megatron.weights.convert to-torch-dist, then to-hf"
        )


def check_functions(run: RunConfig) -> None:
    """Find every function that the run names.  Raises PluginError."""
    _reward(run)
    _keep(run)
    _pick(run)
    step_hooks(run.hooks, _plugin_args(run))
    if run.hooks.source is not None:
        load_source(run.hooks.source, _plugin_args(run))
    _custom(run)


def check_flags(run: RunConfig) -> None:
    """Raise ConfigError if the installed server or router lacks a flag of the run, or is not installed."""
    check_passthrough(run, *_known_flags(run.cluster.use_router))


def _server_flags(run: RunConfig, config: Mapping[str, Any], shape: ModelShape) -> dict[str, str | bool]:
    """The user's server flags, and one with the values of ``shape`` that engines must not take from ``config.json``.

    Raises ConfigError.
    """
    changes = server_changes(config, shape)
    if not changes:
        return run.sglang
    if OVERRIDE_FLAG in run.sglang:
        raise ConfigError(f"--sglang-{OVERRIDE_FLAG} with {', '.join(changes)}: leave one of them out")
    return {**run.sglang, OVERRIDE_FLAG: json.dumps(changes)}


def _known_flags(use_router: bool) -> tuple[frozenset[str], frozenset[str]]:
    """Return the flags of the installed SGLang server and router.  Raises ConfigError."""
    try:
        return known_server_flags(), known_router_flags() if use_router else frozenset()
    except ModuleNotFoundError as error:
        hint = "; without it, --no-use-router sends requests to the engines directly" if use_router else ""
        raise ConfigError(f"{error}{hint}") from error


def _reward(run: RunConfig) -> RewardFn:
    if run.reward.custom_rm_path is not None:
        return load_plugin(run.reward.custom_rm_path, REWARD, _plugin_args(run))
    if run.reward.rm_type is None:
        raise AssertionError("checked by the configuration: there is a reward")
    return BUILT_IN[run.reward.rm_type]


def _keep(run: RunConfig) -> KeepFn:
    path = run.rollout.dynamic_sampling_filter_path
    return _keep_all if path is None else load_plugin(path, KEEP, _plugin_args(run))


def _pick(run: RunConfig) -> PickFn | None:
    path = run.rollout.buffer_filter_path
    return None if path is None else load_plugin(path, PICK, _plugin_args(run))


def _prompts(run: RunConfig, tokenizer: TextTokenizer) -> EndlessPrompts | UserPrompts:
    if run.hooks.source is None:
        return load_prompts(run.data, tokenizer)
    return user_prompts(run, tokenizer, _plugin_args(run))


def _custom(run: RunConfig) -> Resolver | None:
    """Return a resolver of the user's advantage and loss functions, after one call of it.  Raises PluginError.

    The ranks receive the resolver, so that ``engines/`` need not import ``plugins/``.
    """
    advantage, loss = run.train.custom_advantage_function_path, run.train.custom_loss_function_path
    if advantage is None and loss is None:
        return None
    from asyncrl.engines.megatron.train.custom_advantage import custom_of  # imports torch

    resolve = partial(load_custom, advantage, loss, _plugin_args(run), Path.cwd())
    custom_of(resolve)
    return resolve


def _plugin_args(run: RunConfig) -> SimpleNamespace:
    """The ``args`` of plug-ins with slime's signatures."""
    return SimpleNamespace(**flat(run))


def _keep_all(group: ScoredGroup) -> str | None:
    return None
