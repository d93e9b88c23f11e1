"""The programs that run in the process of user code.  The controller pickles these functions and never calls them."""

import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.compat import SlimeArgs, provide_slime
from asyncrl.compat.episodes.loading import set_loader
from asyncrl.compat.episodes.program import slime_program
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.errors import PluginError
from asyncrl.plugins.arguments import split
from asyncrl.plugins.episodes import FLAG, LoadedEpisode, load_episode
from asyncrl.plugins.resolve import named_object
from asyncrl.plugins.rewards import function_of_file, load_reward
from asyncrl.rewards.values import reward_of, rewards_of
from asyncrl.rollouts.environments.program import environment_program
from asyncrl.rollouts.interfaces import EpisodeProgram
from asyncrl.rollouts.native import EpisodeSettings
from asyncrl.rollouts.native_program import NativeProgram
from asyncrl.rollouts.user_process.results import plain_rewards
from asyncrl.types import Prompt, Sample

_MAIN = f"the function of {FLAG}"
"""The path by which the program of slime's shape asks for the function that was loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTask:
    """The function of a run that generates samples, and the settings that it sees."""

    path: str
    args: SlimeArgs
    """The ``args`` of functions of slime's shape."""
    folder: Path
    """The working directory of the run."""
    checkpoint: Path
    tool_timeout_s: float
    max_turns: int | None
    reward_keys: Mapping[str | None, str | None]
    """The entry of dict rewards by the name of an evaluation set; None stands for training."""
    eval_rm_paths: Mapping[str, str] = field(default_factory=dict)
    """The user's reward of each evaluation set that has one."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)


def episode_program(task: EpisodeTask) -> EpisodeProgram:
    """Return the program of the user's function.  Raises PluginError."""
    loaded = _loaded(task.path, task.folder)
    if loaded.shape == "slime":
        return slime_program(
            _MAIN,
            task.args,
            lambda path: loaded.function if path == _MAIN else _named(path),
            eval_rm_paths=task.eval_rm_paths,
        )
    tokenizer, function = load_tokenizer(task.checkpoint), loaded.function
    if loaded.shape == "environment":
        function = environment_program(function, chat=tokenizer.has_chat_template)
    settings = EpisodeSettings(
        tokenizer=tokenizer,
        tool_timeout_s=task.tool_timeout_s,
        max_turns=task.max_turns,
        reward_keys=task.reward_keys,
        template_variables=task.template_variables,
    )
    return NativeProgram(function, settings)


def _named(path: str) -> Any:
    """Return the function of a path, also of a file alone.  Raises PluginError."""
    return function_of_file(Path(path)) if path.endswith(".py") else named_object(path)


class _Found:
    """A function that was found and is not called."""

    def __init__(self, shape: str) -> None:
        self.facts = {"shape": shape}


def check_episode(path: str, folder: Path) -> _Found:
    """Import the user's function, for a check that has no checkpoint.  Raises PluginError."""
    return _Found(_loaded(path, folder).shape)


def _loaded(path: str, folder: Path) -> LoadedEpisode:
    prepare_imports(folder, path)
    set_loader(_named)  # modules of the shim load functions by path
    try:
        return load_episode(path)
    except PluginError as error:
        raise PluginError(f"{FLAG} '{path}': {error}") from error.__cause__


class RewardProgram:
    """A user's reward; ``facts`` tell where it runs."""

    def __init__(self, path: str, args: SlimeArgs, key: str | None, *, is_group: bool) -> None:
        loaded = load_reward(path, args, is_group=is_group)
        self.facts = {"runs": loaded.runs}
        self._function: Callable[..., Coroutine[Any, Any, Any]] = loaded.function
        self._key = key
        self._is_group = is_group

    async def __call__(self, prompt: Prompt, samples: tuple[Sample, ...]) -> Any:
        """Return the rewards of ``samples``.  Raises RewardFailed, or what the function raises."""
        if self._is_group:
            return plain_rewards(rewards_of(await self._function(prompt, samples), self._key))
        (sample,) = samples
        return plain_rewards([reward_of(await self._function(prompt, sample), self._key)])


def reward_program(path: str, args: SlimeArgs, key: str | None, is_group: bool, folder: Path) -> RewardProgram:
    """Return the program of a user's reward.  Raises PluginError."""
    prepare_imports(folder, path)
    return RewardProgram(path, args, key, is_group=is_group)


def prepare_imports(folder: Path, path: str) -> None:
    """Let user code import modules of the working directory, modules next to its own file, and ``slime``."""
    provide_slime()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    place = path if path.endswith(".py") else split(path)[0].rpartition(":")[0]
    beside = str(Path(place).expanduser().resolve().parent)
    if place.endswith(".py") and beside not in sys.path:
        sys.path.append(beside)
