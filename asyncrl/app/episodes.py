"""Generation by user functions: its checks, and the function that the pipeline calls."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from uuid import uuid4

from asyncrl.app.user_code import UserCode
from asyncrl.app.user_programs import EpisodeTask, check_episode, episode_program
from asyncrl.compat import SlimeArgs
from asyncrl.config import RunConfig
from asyncrl.config.derived import reward_key
from asyncrl.models.shape import ModelShape
from asyncrl.pipeline.sampling.episode_settings import EpisodeSettings
from asyncrl.plugins.episodes import FLAG
from asyncrl.rollouts.interfaces import Gateway
from asyncrl.rollouts.session import EpisodeLimits
from asyncrl.rollouts.user_process.episodes import UserEpisodes
from asyncrl.rollouts.user_process.host import UserProcesses

PROGRAM = "episodes"
"""The name of the run's episodes among the programs of the process."""
EPISODES_PER_SLOT = 4
"""Open episodes per slot, by default: engines stay busy while tools take three times as long as turns."""


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
        reward_key=reward_key(run.reward),
        template_variables=run.data.template_variables,
    )
    user_code.load(PROGRAM, partial(episode_program, task), f"{FLAG} '{path}'")


def max_episodes(run: RunConfig, num_slots: int) -> int:
    """Return the maximum number of open episodes."""
    return run.episodes.max_episodes or EPISODES_PER_SLOT * num_slots


def episode_settings(
    run: RunConfig,
    shape: ModelShape,
    processes: UserProcesses,
    gateway: Gateway,
    decode: Callable[[tuple[int, ...]], str],
) -> EpisodeSettings:
    """Return the function that the pipeline calls for each place of a group, with its limits."""
    limits = EpisodeLimits(
        vocabulary_size=shape.vocab_size,
        max_context_len=min(run.episodes.rollout_max_context_len or shape.max_positions, shape.max_positions),
        max_turns=run.episodes.max_turns,
    )
    function = UserEpisodes(processes, PROGRAM, gateway=gateway, limits=limits, decode=decode)
    return EpisodeSettings(function=function, timeout_s=run.episodes.episode_timeout_s, key=f"{uuid4().hex[:8]}-")
