"""The reward that a configuration describes, and the limits of its processes."""

import os
import pickle
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from asyncrl.app.user_code import UserCode
from asyncrl.compat import SlimeArgs
from asyncrl.config.areas import RewardConfig, RunConfig
from asyncrl.errors import DataError
from asyncrl.plugins.kinds import REWARD
from asyncrl.plugins.rewards import load_reward, method_of_class, plain_function
from asyncrl.protocols import RewardFn
from asyncrl.rewards.built_in import BuiltIn, Decode
from asyncrl.rewards.functions import Batched, InPool, InPoolGroup, InUserProcess, InUserProcessGroup, SetByEpisode
from asyncrl.rewards.resources import RewardSettings
from asyncrl.types import Prompt

MOST_WORKERS = 16
"""Default number of processes that grade, at most: each grades hundreds of answers per second."""


def build_reward(
    reward: RewardConfig,
    args: SlimeArgs,
    user_code: UserCode,
    without_specials: Decode | None = None,
    *,
    has_episodes: bool = False,
) -> RewardFn:
    """Return the reward.  A user function is imported and checked, a class is not constructed.  Raises PluginError.

    ``user_code`` gets functions written with ``async def``.  With ``has_episodes`` it imports all rewards, and episodes
    may set them.
    ``without_specials`` decodes responses for the built-in rewards that depend on all words; None: they grade
    ``sample.text``.
    """
    path, key, is_group = reward.custom_rm_path, reward.reward_key, reward.group_rm
    if path is None:
        built_in = BuiltIn(reward.rm_type, key=key, url=reward.rm_url, without_specials=without_specials)
        return SetByEpisode(built_in) if has_episodes and reward.rm_type is None else built_in
    label = f"{REWARD.flag} '{path}'"
    name, make = user_code.reward(reward, args)
    runs = (
        user_code.load(name, make, label)["runs"] if has_episodes else load_reward(path, args, is_group=is_group).runs
    )
    if runs == "in the process of user code":
        user_code.add(name, make)
        return (InUserProcessGroup if is_group else InUserProcess)(name, label)
    user_code.remove(name)
    if runs == "as a class":
        return Batched(pickle.dumps(partial(method_of_class, path, args, Path.cwd())), key, label)
    resolver = pickle.dumps(partial(plain_function, path, args, is_group, Path.cwd()))
    return (InPoolGroup if is_group else InPool)(resolver, key, label)


def check_rows(reward: RewardFn, prompts: Iterable[Prompt], source: str) -> None:
    """Check that a built-in reward is known for every row.  Raises DataError with the first row without one."""
    if not isinstance(reward, BuiltIn):
        return
    for prompt in prompts:
        problem = reward.row_problem(prompt)
        if problem is not None:
            raise DataError(f"{source}: row {prompt.row}: {problem}")


def reward_settings(run: RunConfig) -> RewardSettings:
    """Return the limits of the processes and connections of the run's rewards."""
    reward = run.reward
    workers = reward.reward_num_workers or max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // 2))
    return RewardSettings(
        num_workers=workers,
        memory_gb=reward.reward_worker_memory_gb,
        timeout_s=run.failures.reward_timeout_s,
        start_timeout_s=run.cluster.start_timeout_s,
        rm_concurrency=reward.rm_concurrency,
        outage_s=run.failures.reward_outage_s,
        preload=() if reward.custom_rm_path is not None else ("math_verify",),
    )
