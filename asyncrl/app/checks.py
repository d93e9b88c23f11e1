"""The checks before anything expensive starts: they read every file and resolve every function of a run."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.app.episodes import check_episodes, load_episodes, max_context_len
from asyncrl.app.eval_function import load_eval_function
from asyncrl.app.evaluation import CheckedSet, check_eval_lengths, check_eval_rewards, checked_sets
from asyncrl.app.resuming.resume import ResumablePrompts, Start, find_start
from asyncrl.app.rewards import build_reward, check_rows
from asyncrl.app.trackers import check_trackers
from asyncrl.app.user_code import UserCode
from asyncrl.app.user_hooks import StepHooks, step_hooks, user_prompts
from asyncrl.blocking_calls import UserCalls
from asyncrl.capacity.layout import check_engines, check_layout
from asyncrl.capacity.machine import MachineFindings, machine_findings, machine_limits, machine_needs
from asyncrl.compat import BlockingEval, SlimeArgs
from asyncrl.compat.slime_args import slime_args
from asyncrl.config import RewardConfig, RunConfig, check_passthrough, missing_batches
from asyncrl.config.areas import FlagWords
from asyncrl.config.areas.ranges import must, refuse
from asyncrl.config.derived import (
    critic_load,
    has_critic,
    longest_sample,
    num_ranks,
    prompt_limit,
    routing_replay_obstacle,
    run_dir,
    skip_special_tokens,
    weight_bytes,
)
from asyncrl.config.eval_sets import eval_sets
from asyncrl.config.passthrough import API_KEY
from asyncrl.data.end_tokens import end_tokens
from asyncrl.data.prompts import load_prompts
from asyncrl.data.streaming.opened import open_stream
from asyncrl.data.tiktoken_words import RANKS_FILE
from asyncrl.data.tokenizer import TextTokenizer, load_tokenizer
from asyncrl.engines.cluster.actors import PORTS
from asyncrl.engines.megatron.setup.settings import Resolver
from asyncrl.engines.sglang.server_flags import known_router_flags, known_server_flags
from asyncrl.engines.weight_sync.disk import check_disk
from asyncrl.errors import ConfigError, NotNow
from asyncrl.hooks.prompt_source import UserPrompts
from asyncrl.models.described import otherwise
from asyncrl.models.overrides import overridden, server_changes
from asyncrl.models.shape import ModelShape, read_config, read_shape, shape_of
from asyncrl.models.sizes import sent_bytes
from asyncrl.plugins import KEEP, PICK, load_custom, load_plugin, load_source
from asyncrl.protocols import EvalFn, KeepFn, PickFn, RewardFn
from asyncrl.rewards.built_in import Decode
from asyncrl.types import ScoredGroup

logger = logging.getLogger(__name__)

OVERRIDE_FLAG = "json-model-override-args"
"""The SGLang flag that overrides values of config.json."""
CONTEXT_FLAG = "context-length"
"""The SGLang flag of the most tokens of a request."""
NO_TOKENIZER_FLAG = "skip-tokenizer-init"
"""The SGLang flag of servers without a tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModel:
    """A model that the run can train, split and serve, from one reading of ``config.json``."""

    config: Mapping[str, Any]
    """The parsed ``config.json``."""
    shape: ModelShape
    """The shape in ``config``, with the run's shape flags applied."""
    server_flags: dict[str, FlagWords]
    """The SGLang server's flags: the user's but for the key, and shape flags that override ``config.json``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A run whose files and functions exist and fit together."""

    run: RunConfig
    model: CheckedModel
    tokenizer: TextTokenizer
    end_tokens: tuple[int, ...]
    prompts: ResumablePrompts
    start: Start
    held_out: tuple[CheckedSet, ...]
    eval_function: EvalFn | BlockingEval | None
    """The function that replaces the built-in evaluation, if any."""
    reward: RewardFn
    keep: KeepFn
    pick: PickFn | None
    hooks: StepHooks
    user_code: UserCode
    """The process that has imported the user's ``async`` functions, if the run has any."""
    custom: Resolver | None
    """Finds the user's advantage and loss functions in the driver and in every rank; None without any."""

    @property
    def rewards(self) -> tuple[RewardFn, ...]:
        """The rewards of the run, whose processes start with it."""
        return (self.reward, *(each.reward for each in self.held_out))

    @property
    def num_processes(self) -> int:
        """The number of trainer ranks and engines."""
        return num_ranks(self.run) + self.run.cluster.num_engines


def check(run: RunConfig) -> Checked:
    """Read and resolve everything that the run names, and compare its needs with this machine.

    Doubts about the machine become notes of ``Checked.run``.  Raises ConfigError, DataError or PluginError, and NotNow
    if this machine cannot run it.
    """
    check_flags(run)
    model = check_model(run)
    found = look_at_machine(run, model.shape)
    if found.errors:
        raise NotNow("\n".join(found.errors))
    return check_files(replace(run, notes=(*run.notes, *found.warnings)), model)


def look_at_machine(run: RunConfig, shape: ModelShape) -> MachineFindings:
    """Compare the needs of ``run`` with the limits of this machine."""
    needs = machine_needs(run, shape, run_dir(run, datetime.now()))
    return machine_findings(needs, machine_limits(needs, PORTS))


def check_files(run: RunConfig, model: CheckedModel) -> Checked:
    """Read and resolve everything but the model.  Raises ConfigError, DataError or PluginError.

    The caller closes ``Checked.user_code``.
    """
    with ExitStack() as undo:
        user_code = UserCode(start_timeout_s=run.cluster.start_timeout_s)
        undo.callback(user_code.close)
        checked = _checked_files(run, model, user_code)
        undo.pop_all()
        return checked


def _checked_files(run: RunConfig, model: CheckedModel, user_code: UserCode) -> Checked:
    check_trackers(run.trackers)
    args = slime_args(run, max_context_len(run, model.shape))
    load_episodes(run, args, user_code)
    custom = _custom(run, args)
    if run.train.update_weight_disk_dir is not None:
        check_disk(run.train.update_weight_disk_dir, sent_bytes(model.shape, weight_bytes(run.model)))
    tokenizer = load_tokenizer(
        run.model.hf_checkpoint, skip_special_tokens=skip_special_tokens(run.rollout, run.reward)
    )
    reward_of = partial(_reward, run, args, user_code, without_specials=_without_specials(run, tokenizer))
    reward = reward_of(run.reward)
    prompts = _prompts(run, args, tokenizer, reward, model)
    start = find_start(run, prompts, model.shape)
    refuse(missing_batches(run, start.step))
    return Checked(
        run=run,
        model=model,
        tokenizer=tokenizer,
        end_tokens=end_tokens(run.model.hf_checkpoint, model.config),
        prompts=prompts,
        start=start,
        held_out=checked_sets(run, tokenizer, model.shape.max_positions, reward_of),
        eval_function=load_eval_function(run.evaluation.eval_function_path, args),
        reward=reward,
        keep=_keep(run, args),
        pick=_pick(run, args),
        hooks=step_hooks(run.hooks, args, prompts.get_samples if isinstance(prompts, UserPrompts) else None),
        user_code=user_code,
        custom=custom,
    )


def _prompts(
    run: RunConfig, args: SlimeArgs, tokenizer: TextTokenizer, reward: RewardFn, model: CheckedModel
) -> ResumablePrompts:
    """Read all prompts, open a stream of them, or make the user's source.

    Raises DataError, PluginError or HookFailed.
    """
    if run.hooks.source is not None:
        return user_prompts(run, tokenizer, args)
    if run.data.streaming_data:
        return open_stream(run.data, tokenizer, run.model.hf_checkpoint)
    room = _room_for_prompts(run, model)
    prompts = load_prompts(run.data, tokenizer, takes_numbers=run.episodes.has_episodes, most_tokens=room)
    check_rows(reward, prompts.rows, ", ".join(map(str, run.data.prompt_data)))
    return prompts


def _room_for_prompts(run: RunConfig, model: CheckedModel) -> int | None:
    """Return the tokens that a prompt may have without ``--rollout-max-prompt-len``; None for any number.

    As in slime, ``--rollout-max-context-len`` leaves room for one token of a response.  Without episodes, a whole
    response must fit behind a prompt: SGLang refuses longer ones.
    """
    limit = prompt_limit(run)
    if run.episodes.has_episodes:
        return limit
    context = _given_context(model.server_flags)
    positions = model.shape.max_positions if context is None else min(model.shape.max_positions, context)
    room = positions - run.rollout.rollout_max_response_len
    return max(1, room if limit is None else min(room, limit))


def _given_context(server_flags: Mapping[str, FlagWords]) -> int | None:
    given = server_flags.get(CONTEXT_FLAG)
    return int(given) if isinstance(given, str) and given.isdecimal() else None


def check_model(run: RunConfig) -> CheckedModel:
    """Read ``config.json`` and check that the run can train, split and serve its model.  Raises ConfigError."""
    config = read_config(run.model.hf_checkpoint)
    shape = overridden(shape_of(config), run.shape)
    refuse(otherwise(config, shape, run.foreign))
    check_layout(shape, run.parallel, run.cluster.device)
    if run.cluster.device != "cpu":  # there an engine is one process
        check_engines(shape, run.cluster.rollout_num_gpus_per_engine, run.sglang)
    _check_critic(run, shape)
    check_served(run.model.hf_checkpoint, shape, run.cluster.device)
    server_flags = _server_flags(run, config, shape)
    context = _given_context(server_flags)
    refuse(_too_long(run, shape, context) + _routing_replay(run, shape) + _stop_tokens(run, shape.vocab_size))
    check_eval_lengths(run, shape.max_positions)
    return CheckedModel(config=config, shape=shape, server_flags=server_flags)


def _check_critic(run: RunConfig, policy: ModelShape) -> None:
    """Check that a critic from another folder can be trained and split, with the policy's vocabulary.

    Raises ConfigError.
    """
    folder = critic_load(run.train, run.model)
    is_other = has_critic(run.train) and folder != run.model.hf_checkpoint
    if not is_other or not (folder / "config.json").is_file():
        return
    try:
        critic = read_shape(folder)
        check_layout(critic, run.parallel, run.cluster.device)
    except ConfigError as error:
        lines = str(error).splitlines()
        refuse(f"critic-load {folder}: {line.removeprefix('hf-checkpoint: ')}" for line in lines)
    else:
        refuse(
            must(
                critic.vocab_size == policy.vocab_size,
                f"critic-load {folder} has a vocabulary size of {critic.vocab_size}, the policy {policy.vocab_size}; "
                "they must be equal",
            )
        )


def _stop_tokens(run: RunConfig, vocab_size: int) -> list[str]:
    """One line for each list of stop tokens with an id that the model cannot write."""
    shared = run.rollout.rollout_stop_token_ids
    lists = {f"{each.label}: stop_token_ids": each.stop_token_ids for each in eval_sets(run)}
    lists = {name: ids for name, ids in lists.items() if ids != shared} | {"rollout-stop-token-ids": shared}
    return [
        f"{name} {wrong[0]}: the model's token ids are 0 to {vocab_size - 1}"
        for name, ids in lists.items()
        if (wrong := [one for one in ids if not 0 <= one < vocab_size])
    ]


def _routing_replay(run: RunConfig, shape: ModelShape) -> list[str]:
    """One line if routing replay is asked for and not possible; where it is off for that reason, a warning."""
    given, obstacle = run.rollout.use_rollout_routing_replay, routing_replay_obstacle(run)
    if given and shape.experts is None:
        return [f"use-rollout-routing-replay: {run.model.hf_checkpoint} is no mixture of experts; leave it out"]
    if given and obstacle is not None:
        return [f"use-rollout-routing-replay with {obstacle}; leave one of them out"]
    if given is None and shape.experts is not None and obstacle is not None:
        logger.warning("routing replay (use-rollout-routing-replay) is off: %s", obstacle)
    return []


def _too_long(run: RunConfig, shape: ModelShape, context: int | None) -> list[str]:
    """One line if the longest sample has more tokens than positions, because SGLang refuses such requests."""
    limit, response = run.data.rollout_max_prompt_len, run.rollout.rollout_max_response_len
    positions, there = shape.max_positions, f"the model has {shape.max_positions} positions (max-position-embeddings)"
    if context is not None and context < positions:
        positions, there = context, f"the engines take {context} (sglang-{CONTEXT_FLAG})"
    there = f"tokens, {there}"
    total = longest_sample(run, response)
    line = f"rollout-max-response-len {response} {there}, and a prompt must have room as well"
    if limit is not None:
        line = f"rollout-max-prompt-len {limit} + rollout-max-response-len {response} = {total} {there}"
    return must(total <= positions, line)


def check_served(checkpoint: Path, shape: ModelShape, device: str) -> None:
    """Raise ConfigError if SGLang 0.5.16 cannot serve ``checkpoint`` on ``device``.

    It has neither fp8 nor, on the plug-in's CPU platform, a KV cache of latent attention.
    """
    if device == "cpu" and shape.fp8_block is not None:
        raise ConfigError(
            f"hf-checkpoint: {checkpoint} is in fp8, which SGLang serves on GPUs alone; make a copy that is not: "
            "python -m asyncrl.engines.megatron.weights.convert to-torch-dist, then to-hf"
        )
    if device == "cpu" and shape.latent is not None:
        raise ConfigError(
            f"hf-checkpoint: {checkpoint} has latent attention, which SGLang serves on GPUs alone; give device cuda or "
            "another model"
        )


def check_functions(run: RunConfig) -> None:
    """Find every function that the run names.  Raises PluginError."""
    args = slime_args(run, None)  # the model is not read
    user_code = UserCode(start_timeout_s=run.cluster.start_timeout_s)
    try:
        check_episodes(run, user_code)
        _reward(run, args, user_code, run.reward)
        check_eval_rewards(run, partial(_reward, run, args, user_code))
    finally:
        user_code.close()
    load_eval_function(run.evaluation.eval_function_path, args)
    _keep(run, args)
    _pick(run, args)
    step_hooks(run.hooks, args)
    if run.hooks.source is not None:
        load_source(run.hooks.source, args)
    _custom(run, args)


def check_flags(run: RunConfig) -> None:
    """Raise ConfigError if the installed server or router lacks a flag of the run, or is not installed."""
    check_passthrough(run, *_known_flags(run.cluster.use_router))


def _server_flags(run: RunConfig, config: Mapping[str, Any], shape: ModelShape) -> dict[str, FlagWords]:
    """The user's server flags, and one with the values of ``shape`` that engines must not take from ``config.json``.

    Raises ConfigError.
    """
    flags = {**_tokenizer_flags(run), **{name: value for name, value in run.sglang.items() if name != API_KEY}}
    changes = server_changes(config, shape)
    if not changes:
        return flags
    if OVERRIDE_FLAG in run.sglang:
        raise ConfigError(f"--sglang-{OVERRIDE_FLAG} with {', '.join(changes)}: leave one of them out")
    return {**flags, OVERRIDE_FLAG: json.dumps(changes)}


def _tokenizer_flags(run: RunConfig) -> dict[str, bool]:
    """The flag of servers without a tokenizer, where SGLang's would execute code in the model's folder.

    Tokens travel as ids, so only stop strings and minimum lengths need a tokenizer in the server.  Raises ConfigError
    for them.
    """
    needs_code = not (run.model.hf_checkpoint / "tokenizer.json").is_file()
    if not needs_code or run.sglang.keys() & {"trust-remote-code", NO_TOKENIZER_FLAG}:
        return {}
    where = f"with {run.model.hf_checkpoint / RANKS_FILE}"
    code = "SGLang's tokenizer executes code in that folder"
    refuse(
        f"{setting} {where}: {why}, and {code}; {instead}, or allow it with --sglang-trust-remote-code"
        for setting, why, instead in _tokenizer_needs(run)
    )
    return {NO_TOKENIZER_FLAG: True}


def _tokenizer_needs(run: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each setting that needs a tokenizer in the engines, the reason, and a replacement."""
    texts, stop = "engines compare texts", run.rollout.rollout_stop
    if stop:
        yield "rollout-stop", texts, "give rollout-stop-token-ids"
    for each in eval_sets(run) if run.evaluation.eval_interval is not None else ():
        if each.stop and each.stop != stop:
            yield f"{each.label}: stop", texts, "give stop_token_ids"
        if each.min_new_tokens:
            yield f"{each.label}: min_new_tokens", "engines look up the end token", "leave it out"


def _known_flags(use_router: bool) -> tuple[frozenset[str], frozenset[str]]:
    """Return the flags of the installed SGLang server and router.  Raises ConfigError."""
    try:
        return known_server_flags(), known_router_flags() if use_router else frozenset()
    except ModuleNotFoundError as error:
        hint = "; without it, --no-use-router sends requests to the engines directly" if use_router else ""
        raise ConfigError(f"{error}{hint}") from error


def _reward(
    run: RunConfig,
    args: SlimeArgs,
    user_code: UserCode,
    reward: RewardConfig,
    without_specials: Decode | None = None,
) -> RewardFn:
    """Return the reward that ``reward`` describes: the run's, or that of a set of held-out prompts."""
    is_without = skip_special_tokens(run.rollout, reward)  # so are its samples' texts
    return build_reward(
        reward,
        args,
        user_code,
        None if is_without else without_specials,
        has_episodes=run.episodes.has_episodes,
    )


def _without_specials(run: RunConfig, tokenizer: TextTokenizer) -> Decode | None:
    """Return the decoding of responses without special tokens; None if the run's flag decides for every row."""
    return None if run.rollout.rollout_skip_special_tokens is not None else tokenizer.skipping(True).decode


def _keep(run: RunConfig, args: SlimeArgs) -> KeepFn:
    path = run.rollout.dynamic_sampling_filter_path
    if path is None:
        return _keep_all
    return UserCalls(f"{KEEP.flag} '{path}'").of(load_plugin(path, KEEP, args))


def _pick(run: RunConfig, args: SlimeArgs) -> PickFn | None:
    path = run.rollout.buffer_filter_path
    if path is None:
        return None
    return UserCalls(f"{PICK.flag} '{path}'").of(load_plugin(path, PICK, args))


def _custom(run: RunConfig, args: SlimeArgs) -> Resolver | None:
    """Return a resolver of the user's functions of the objective, after one call of it.  Raises PluginError.

    The ranks receive the resolver, so that ``engines/`` need not import ``plugins/``.
    """
    train = run.train
    advantage, loss, tis = (
        train.custom_advantage_function_path,
        train.custom_loss_function_path,
        train.custom_tis_function_path,
    )
    if advantage is None and loss is None and tis is None:
        return None
    from asyncrl.engines.megatron.train.custom_advantage import custom_of  # imports torch

    resolve = partial(load_custom, advantage, loss, args, Path.cwd(), tis)
    custom_of(resolve)
    return resolve


def _keep_all(group: ScoredGroup) -> str | None:
    return None
