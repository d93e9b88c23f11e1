"""The user's data source and the functions that are called once per step, as the settings name them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from asyncrl.compat import Sample, SlimeArgs
from asyncrl.compat.batch_hooks import all_samples_from_slime
from asyncrl.compat.slime_sample import sample_of
from asyncrl.config.areas import HookConfig, RunConfig
from asyncrl.config.derived import prompt_limit
from asyncrl.data.prompts import EndlessPrompts, load_prompts
from asyncrl.data.tokenizer import TextTokenizer
from asyncrl.data.user_prompts import tokeniser
from asyncrl.hooks.batch_hooks import BatchHooks, FlaggedHook
from asyncrl.hooks.log_hooks import LogHooks
from asyncrl.hooks.native_source import NativeSource
from asyncrl.hooks.prompt_source import FLAG, UserPrompts
from asyncrl.hooks.worker import Worker
from asyncrl.plugins import (
    ALL_SAMPLES,
    CONVERT,
    EVAL_LOG,
    POST_PROCESS,
    ROLLOUT_LOG,
    SAMPLE_FILTER,
    Kind,
    load_plugin,
    load_source,
)
from asyncrl.protocols import BatchHook, EvalLogFn, RolloutLogFn, UserSource
from asyncrl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHooks:
    """The user functions that are called once per step."""

    config: HookConfig
    before_training: tuple[FlaggedHook, ...]
    """Hooks between the batch and the trainer, in their order."""
    rollout_log: RolloutLogFn | None
    eval_log: EvalLogFn | None

    def batch_hooks(self) -> BatchHooks | None:
        """Return the hooks between the batch and the trainer; None without any."""
        if not self.before_training:
            return None
        keeps = self.config.rollout_all_samples_process_path is not None
        return BatchHooks(self.before_training, Worker("hooks"), self.config.hook_timeout_s, keeps_filtered=keeps)

    def log_hooks(self) -> LogHooks | None:
        """Return the log functions; None without any."""
        if self.rollout_log is None and self.eval_log is None:
            return None
        return LogHooks(self.rollout_log, self.eval_log, lambda: Worker("log-function"), self.config.hook_timeout_s)


def step_hooks(config: HookConfig, args: SlimeArgs, get_samples: Callable[[int], Any] | None = None) -> StepHooks:
    """Load the functions that ``config`` names; ``get_samples`` is that of the user's data source.

    Raises PluginError.
    """
    seeing = replace(ALL_SAMPLES, from_slime=partial(all_samples_from_slime, get_samples=get_samples))
    named: list[tuple[str | None, Kind[BatchHook]]] = [
        (config.rollout_sample_filter_path, SAMPLE_FILTER),
        (config.rollout_all_samples_process_path, seeing),
        (config.custom_reward_post_process_path, POST_PROCESS),
        (config.custom_convert_samples_to_train_data_path, CONVERT),
    ]
    rollout_log, eval_log = config.custom_rollout_log_function_path, config.custom_eval_rollout_log_function_path
    return StepHooks(
        config=config,
        before_training=tuple(
            FlaggedHook(flag=kind.flag, hook=load_plugin(path, kind, args)) for path, kind in named if path is not None
        ),
        rollout_log=None if rollout_log is None else load_plugin(rollout_log, ROLLOUT_LOG, args),
        eval_log=None if eval_log is None else load_plugin(eval_log, EVAL_LOG, args),
    )


class PromptRows:
    """The rows of ``--prompt-data`` as slime's groups, read by ``read`` or when the first is wanted."""

    def __init__(self, run: RunConfig, tokenizer: TextTokenizer) -> None:
        self._run = run
        self._tokenizer = tokenizer

    @cached_property
    def _rows(self) -> EndlessPrompts:
        return load_prompts(self._run.data, self._tokenizer, takes_numbers=self._run.episodes.has_episodes)

    def read(self) -> None:
        """Read the rows now.  Raises DataError."""
        _ = self._rows

    @property
    def position(self) -> int:
        """Rows taken so far."""
        return self._rows.position

    @position.setter
    def position(self, position: int) -> None:
        self._rows.seek(position)

    def sample(self, num_samples: int) -> list[list[Sample]]:
        """Return the next groups, in the order in which a run without a data source takes the rows."""
        return [self._group(self._rows.take()) for _ in range(num_samples)]

    def __len__(self) -> int:
        """Return the number of rows per epoch."""
        return len(self._rows)

    def _group(self, prompt: Prompt) -> list[Sample]:
        # Without the tokens: a derived class may change the prompt.
        return [sample_of(prompt) for _ in range(self._run.rollout.n_samples_per_prompt)]


def user_prompts(run: RunConfig, tokenizer: TextTokenizer, args: SlimeArgs) -> UserPrompts:
    """Make the user's data source, in its thread.  Raises PluginError, DataError or HookFailed."""
    path = run.hooks.source
    if path is None:
        raise AssertionError("there is no data source of the user")
    make = load_source(path, args, lambda: PromptRows(run, tokenizer))
    worker = Worker("data-source")
    is_stored = run.checkpoint.save is not None

    def made() -> UserSource:
        source = make()
        if is_stored and isinstance(source, NativeSource):
            source.state(0)  # a state that cannot be stored would end the run at its first checkpoint
        return source

    return UserPrompts(
        worker.call_now(made, f"{FLAG} {path}", run.hooks.data_source_timeout_s),
        tokeniser(tokenizer, prompt_limit(run), run.data.template_variables, is_stored=is_stored),
        name=path,
        ahead=run.hooks.data_source_prefetch or run.rollout.rollout_batch_size,
        worker=worker,
        timeout_s=run.hooks.data_source_timeout_s,
    )
