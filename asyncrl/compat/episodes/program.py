"""A function of slime's shape as a program of episodes, in the process of user code.

EpisodeCall ──▶ Sample, args, sampling_params ──▶ the function ──▶ reward, on the same objects ──▶ SlimeResult
"""

import inspect
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from asyncrl.compat.episodes.arguments import args_of_episode
from asyncrl.compat.episodes.function_paths import function_path
from asyncrl.compat.episodes.loading import Load, set_loader
from asyncrl.compat.episodes.needs import needs_of
from asyncrl.compat.episodes.new_samples import new_sample, sampling_params
from asyncrl.compat.episodes.shapes import Shape, is_slime_reward, shape_of
from asyncrl.compat.episodes.state import state_of
from asyncrl.compat.slime_path import provide_slime
from asyncrl.compat.slime_sample import Sample
from asyncrl.compat.slime_types import SlimeArgs
from asyncrl.errors import EpisodeFailed, PluginError
from asyncrl.rollouts.interfaces import EpisodeCall, SlimeResult

logger = logging.getLogger(__name__)


def slime_program(
    path: str,
    args: SlimeArgs,
    load: Load,
    *,
    eval_rm_paths: Mapping[str, str] | None = None,
) -> "SlimeProgram":
    """Load the function of ``--custom-generate-function-path`` and the reward function of the run.

    ``args`` is what ``slime_args`` returned, ``load`` loads a function by path, and ``eval_rm_paths`` are the reward
    functions of evaluation sets.  Call it once, in the process of user code; no event loop need run.  Raises
    PluginError.
    """
    provide_slime()
    set_loader(load)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # its lines have addresses, with the keys of episodes
    function = load(function_path(path))
    _tell_needs(function)
    eval_paths = {name: each for name, each in (eval_rm_paths or {}).items() if is_slime_reward(_reward(each, load))}
    trains = args.custom_rm_path is not None and is_slime_reward(_reward(args.custom_rm_path, load))
    return SlimeProgram(function, shape_of(function), args, eval_paths, scores_training=trains)


class SlimeProgram:
    """Runs a function of slime's shape.  It keeps nothing between episodes."""

    def __init__(
        self,
        function: Callable[..., Any],
        shape: Shape,
        base: SlimeArgs,
        eval_paths: Mapping[str, str],
        *,
        scores_training: bool,
    ) -> None:
        """``eval_paths`` are reward functions by evaluation set; ``scores_training``: ``args`` has that of training."""
        self._function = function
        self._shape = shape
        self._base = base
        self._eval_paths = eval_paths
        self._scored = {*eval_paths, None} if scores_training else {*eval_paths}

    def warm(self) -> None:
        """Import what ``GenerateState`` needs, if the user's files import it.  Blocks for seconds.

        Otherwise the first episode would import torch on the loop, while all other episodes stand still.
        """
        if "slime.utils.processing_utils" in sys.modules:
            _ = import_module("transformers").AutoTokenizer  # transformers imports its parts when they are read

    async def __call__(self, call: EpisodeCall, /) -> SlimeResult:
        """Run one episode, and compute the missing rewards.  Raises EpisodeFailed, or what user code raises."""
        import_module("slime.utils.http_utils").init_http_client(self._base)  # files read its client
        args, sample = args_of_episode(self._base, call.address), new_sample(call)
        if (path := self._eval_paths.get(call.start.data_set or "")) is not None:
            args.custom_rm_path = sample.custom_rm_path = path
        returned = self._called(args, sample, call)
        if not inspect.isawaitable(returned):
            raise EpisodeFailed(f"the function returned a {type(returned).__name__}; write it with 'async def'")
        found, is_list = _samples(await returned, self._shape)
        found = await _hooked(args, found, call)
        await self._score(args, found, call.start.data_set, is_list=is_list)
        return SlimeResult(samples=tuple(state_of(each) for each in found), is_list=is_list)

    def _called(self, args: SlimeArgs, sample: Sample, call: EpisodeCall) -> Awaitable[Any]:
        further = {"evaluation": call.start.data_set is not None} if self._shape.names_evaluation else {}
        if self._shape.takes_list:
            found = self._function(args, [sample], **further)
        else:
            found = self._function(args, sample, sampling_params(call.start, args), **further)
        return found  # type: ignore[no-any-return]

    async def _score(self, args: SlimeArgs, found: list[Sample], data_set: str | None, *, is_list: bool) -> None:
        """Set missing rewards as slime does, with functions that can run here; the controller sets the others."""
        if args.group_rm and data_set is None:
            return
        rollout = import_module("slime.rollout.sglang_rollout")
        if data_set in self._scored:
            await rollout.add_rewards(args, found if is_list else found[0])
            return
        for sample in found:
            if sample.custom_rm_path:
                await rollout.add_rewards(args, sample)


async def _hooked(args: SlimeArgs, found: list[Sample], call: EpisodeCall) -> list[Sample]:
    hooks = import_module("slime.rollout.sample_hooks")
    return list(await hooks.apply_rollout_sample_hooks(args, found, evaluation=call.start.data_set is not None))


def _samples(returned: Any, shape: Shape) -> tuple[list[Sample], bool]:
    """Return the samples, and whether the function fanned out.  Raises EpisodeFailed."""
    found = list(returned) if isinstance(returned, list | tuple) else [returned]
    wrong = next((each for each in found if not isinstance(each, Sample)), None)
    if wrong is not None or returned is None:
        kind = type(returned if wrong is None else wrong).__name__
        raise EpisodeFailed(f"the function returned a {kind}; return the Sample, or a list of Samples")
    return found, isinstance(returned, list | tuple) and not (shape.takes_list and len(found) == 1)


def _reward(path: str, load: Load) -> Any:
    """Return a reward function.  Raises PluginError, which names the flag."""
    try:
        return load(path)
    except PluginError as error:
        raise PluginError(f"--custom-rm-path '{path}': {error}") from error.__cause__


def _tell_needs(function: Callable[..., Any]) -> None:
    """Warn of imports inside functions that will fail when they run."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    for need in needs_of(Path(code.co_filename)) if code is not None else ():
        logger.warning("%s; the import fails when it runs", need)


__all__ = ["PluginError", "SlimeProgram", "slime_program"]
