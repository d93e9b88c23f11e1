"""Generation by user functions: its checks, and the function that the pipeline calls."""

import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from asyncrl.app.user_code import UserCode
from asyncrl.app.user_programs import EpisodeTask, check_episode, episode_program
from asyncrl.compat import SlimeArgs
from asyncrl.compat.episodes.trajectories import outcome_of
from asyncrl.config import RunConfig
from asyncrl.config.derived import reward_key
from asyncrl.config.eval_sets import eval_sets
from asyncrl.data.tokenizer import TextTokenizer
from asyncrl.episodes import EpisodeOutcome
from asyncrl.models.shape import ModelShape
from asyncrl.pipeline.sampling.episode_load import EpisodeLoad
from asyncrl.pipeline.sampling.episode_settings import EpisodeSettings
from asyncrl.plugins.episodes import FLAG
from asyncrl.rollouts.agents import AgentCommand, AgentSettings
from asyncrl.rollouts.gateway.parsing import ParserProcess
from asyncrl.rollouts.gateway.parts import ModelCard
from asyncrl.rollouts.gateway.server import GatewaySettings, HttpGateway
from asyncrl.rollouts.interfaces import Gateway, SlimeResult
from asyncrl.rollouts.session import EpisodeLimits, EpisodeSession
from asyncrl.rollouts.user_process.episodes import UserEpisodes
from asyncrl.rollouts.user_process.host import UserProcesses
from asyncrl.types import Weights

PROGRAM = "episodes"
"""The name of the run's episodes among the programs of the process."""
AGENTS_LOG = "agents.log"
"""File in the folder of the servers' logs with the outputs of agents."""
EPISODES_PER_SLOT = 4
"""Open episodes per slot, by default: engines stay busy while tools take three times as long as turns."""


class ModelFacts(Protocol):
    """The parsed ``config.json`` of a model, and its shape."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def shape(self) -> ModelShape: ...


class CheckedRun(Protocol):
    """The parts of a checked run that its episodes need."""

    @property
    def run(self) -> RunConfig: ...

    @property
    def model(self) -> ModelFacts: ...

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def end_tokens(self) -> tuple[int, ...]: ...


def check_episodes(run: RunConfig, user_code: UserCode) -> None:
    """Import the function that generates samples, in its process.  Raises PluginError."""
    path = run.episodes.custom_generate_function_path
    if path is not None:
        user_code.load(PROGRAM, partial(check_episode, path, Path.cwd()), f"{FLAG} '{path}'")


def load_episodes(run: RunConfig, args: SlimeArgs, user_code: UserCode) -> None:
    """Make the program that generates samples, in its process.  Raises PluginError."""
    path = run.episodes.custom_generate_function_path
    if path is None:
        return
    task = EpisodeTask(
        path=path,
        args=args,
        folder=Path.cwd(),
        checkpoint=run.model.hf_checkpoint.resolve(),
        tool_timeout_s=run.episodes.tool_timeout_s,
        max_turns=run.episodes.max_turns,
        reward_keys=_reward_keys(run),
        eval_rm_paths={
            each.name: each.reward.custom_rm_path for each in eval_sets(run) if each.reward.custom_rm_path is not None
        },
        template_variables=run.data.template_variables,
    )
    user_code.load(PROGRAM, partial(episode_program, task), f"{FLAG} '{path}'")


def max_context_len(run: RunConfig, shape: ModelShape) -> int:
    """Return the maximum number of tokens of an episode."""
    return min(run.episodes.rollout_max_context_len or shape.max_positions, shape.max_positions)


def episode_load(run: RunConfig, num_slots: int) -> EpisodeLoad | None:
    """Return the load of the run's episodes on ``num_slots`` slots; None without episodes."""
    if not run.episodes.has_episodes:
        return None
    return EpisodeLoad(run.episodes.max_episodes or EPISODES_PER_SLOT * num_slots)


@asynccontextmanager
async def running_episodes(
    checked: CheckedRun,
    processes: UserProcesses | None,
    logs: Path,
    weights: Callable[[], Weights],
) -> AsyncIterator[EpisodeSettings | None]:
    """Open the gateway, and give the function that the pipeline calls for each place of a group; None without one."""
    run, shape, tokenizer = checked.run, checked.model.shape, checked.tokenizer
    if not run.episodes.has_episodes:
        yield None
        return
    limits = EpisodeLimits(
        vocabulary_size=shape.vocab_size,
        max_context_len=max_context_len(run, shape),
        max_turns=run.episodes.max_turns,
        end_tokens=checked.end_tokens,
    )
    settings = _gateway_settings(run, checked.model.config, checked.end_tokens, limits.max_context_len)
    async with AsyncExitStack() as opened:
        parser = _parser(run)
        if parser is not None:
            await opened.enter_async_context(parser)
        gateway = await opened.enter_async_context(HttpGateway(settings, tokenizer, weights, parser))
        function = _function(run, logs, processes, gateway, limits, tokenizer.decode)
        if isinstance(function, AgentCommand):
            opened.callback(function.close)
        # Unique among the processes of a run, because a resumed run uses group ids again.
        key = f"{uuid4().hex[:8]}-"
        yield EpisodeSettings(function=function, timeout_s=run.episodes.episode_timeout_s, key=key)


def _function(
    run: RunConfig,
    logs: Path,
    processes: UserProcesses | None,
    gateway: Gateway,
    limits: EpisodeLimits,
    decode: Callable[[tuple[int, ...]], str],
) -> UserEpisodes | AgentCommand:
    episodes = run.episodes
    if episodes.agent_command is not None:
        settings = AgentSettings(
            command=episodes.agent_command,
            model_name=run.model.hf_checkpoint.name,
            log_path=logs / AGENTS_LOG,
        )
        return AgentCommand(settings, gateway, limits, decode)
    assert processes is not None, "the function is one of their programs"
    return UserEpisodes(
        processes,
        PROGRAM,
        gateway=gateway,
        limits=limits,
        decode=decode,
        slime_outcome=partial(_slime_outcome, _reward_keys(run)),
        label=f"{FLAG} '{episodes.custom_generate_function_path}'",
    )


def _reward_keys(run: RunConfig) -> dict[str | None, str | None]:
    """Return the entry of dict rewards by the name of an evaluation set; None stands for training."""
    return {each.name: reward_key(each.reward) for each in eval_sets(run)} | {None: reward_key(run.reward)}


def _slime_outcome(
    keys: Mapping[str | None, str | None], session: EpisodeSession, result: SlimeResult
) -> EpisodeOutcome:
    return outcome_of(session, result, reward_key=keys.get(session.start.data_set))


def _gateway_settings(
    run: RunConfig, config: Mapping[str, Any], end_tokens: tuple[int, ...], context_len: int
) -> GatewaySettings:
    checkpoint = run.model.hf_checkpoint
    architectures = config.get("architectures")
    return GatewaySettings(
        card=ModelCard(
            name=checkpoint.name,
            path=str(checkpoint.resolve()),
            max_context_len=context_len,
            model_type=config.get("model_type"),
            architectures=tuple(architectures) if isinstance(architectures, list) else None,
        ),
        end_tokens=end_tokens,
        host=run.episodes.gateway_host,
        port=run.episodes.gateway_port,
        template_variables=run.data.template_variables,
    )


def _parser(run: RunConfig) -> ParserProcess | None:
    """Return the process with SGLang's parsers that the run names for its servers; None if it names none."""
    tools, reasoning = (run.sglang.get(name) for name in ("tool-call-parser", "reasoning-parser"))
    if tools is None and reasoning is None:
        return None
    return ParserProcess(
        (sys.executable, "-m", "asyncrl.engines.sglang.answer_parser"),
        tool_call_parser=None if tools is None else str(tools),
        reasoning_parser=None if reasoning is None else str(reasoning),
    )
