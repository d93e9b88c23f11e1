"""The sets of held-out prompts with all their settings, from flags and from the file of ``--eval-config``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from asyncrl.config.areas import DataConfig, RewardConfig, RunConfig
from asyncrl.config.areas.evaluation import EvalEntry
from asyncrl.config.areas.ranges import must, refuse
from asyncrl.config.derived import eval_max_response_len, eval_temperature, eval_top_k, eval_top_p, longest_sample
from asyncrl.config.eval_file import KEYS
from asyncrl.config.knobs import knobs
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """One set of held-out prompts.  Raises ConfigError if a value is out of range."""

    name: str
    origin: str
    """The file that has the set, for error lines; empty for a set of ``--eval-prompt-data``."""
    path: Path
    n_samples_per_eval_prompt: int
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    max_response_len: int
    min_new_tokens: int
    max_prompt_len: int | None
    """Maximum length of a prompt in tokens; longer prompts are left out."""
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    """Ids of tokens that end a response, without the model's end tokens."""
    pass_threshold: float | None
    data: DataConfig
    """The keys of the rows; without a length limit, because ``max_prompt_len`` is that of the set."""
    reward: RewardConfig
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Values that replace those in the metadata of every row."""

    def __post_init__(self) -> None:
        refuse(f"{self.label}: {line}" for line in self._problems())

    @property
    def label(self) -> str:
        """The name of the set in error lines."""
        return f"{self.origin}: {self.name}" if self.origin else f"eval-prompt-data {self.name}"

    def _problems(self) -> list[str]:
        return (
            must(self.n_samples_per_eval_prompt >= 1, "n_samples_per_eval_prompt must be at least 1")
            + must(self.temperature >= 0, f"temperature must be at least 0, got {self.temperature}")
            + must(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, got {self.top_p}")
            + must(self.top_k == -1 or self.top_k >= 1, f"top_k must be -1 (off) or at least 1, got {self.top_k}")
            + must(
                0 < self.repetition_penalty <= 2,
                f"repetition_penalty must be above 0 and at most 2, got {self.repetition_penalty}",
            )
            + must(self.max_response_len >= 1, f"max_response_len must be at least 1, got {self.max_response_len}")
            + must(
                0 <= self.min_new_tokens <= self.max_response_len,
                f"min_new_tokens must be 0 to max_response_len {self.max_response_len}, got {self.min_new_tokens}",
            )
            + must(self.max_prompt_len is None or self.max_prompt_len >= 1, "max_prompt_len must be at least 1")
            + must("" not in self.stop, "stop must not contain an empty string")
        )


def eval_sets(run: RunConfig) -> tuple[EvalSet, ...]:
    """Return the run's sets in the given order.  Raises ConfigError if a value of a set is out of range."""
    pairs = [_flag_set(run, name, path) for name, path in run.evaluation.data_sets]
    return tuple(pairs) if run.evaluation.eval_config is None else tuple(_file_set(run, e) for e in run.eval_entries)


def missing_eval_files(run: RunConfig, missing: Callable[[str, Path], list[str]]) -> list[str]:
    """One line for each missing file; ``missing`` returns that of the prompts in a path, after a setting's name."""
    file = run.evaluation.eval_config
    lines = must(file is None or file.is_file(), f"eval-config {file}: no such file")
    return lines + [line for each in eval_sets(run) for line in missing(each.label, each.path)]


def eval_problems(run: RunConfig, reward_problems: Callable[[RewardConfig, DataConfig], list[str]]) -> list[str]:
    """One line for each contradiction; ``reward_problems`` returns those of a reward for rows with given keys."""
    evaluation = run.evaluation
    interval, file, function = evaluation.eval_interval, evaluation.eval_config, evaluation.eval_function_path
    lines = must(
        interval is None or bool(evaluation.data_sets) or file is not None or function is not None,
        f"eval-interval {interval} without eval-prompt-data; give NAME PATH pairs of held-out prompts, or eval-config, "
        "or --eval-interval none for no evaluation",
    )
    lines += must(
        not evaluation.data_sets or file is None,
        f"eval-config {file} with eval-prompt-data, whose sets would not be used; leave one of them out "
        "(--eval-prompt-data without words takes back that of a TOML file)",
    )
    sets = eval_sets(run)
    lines += must(
        interval is None or not any(each.reward.group_rm for each in sets),
        "group-rm with eval-interval: evaluation grades each response alone; leave out eval-interval",
    )
    shared = reward_problems(run.reward, run.data)
    rewards = {each.label: reward_problems(each.reward, each.data) for each in sets}
    return lines + [f"{label}: {line}" for label, mine in rewards.items() for line in mine if line not in shared]


def longest_request(run: RunConfig) -> int:
    """The maximum length in tokens of a prompt with its response, in training and evaluation."""
    held_out = eval_sets(run) if run.evaluation.eval_interval is not None else ()
    training = longest_sample(run, run.rollout.rollout_max_response_len)
    return max([training, *(longest_held_out(run, each) for each in held_out)])


def longest_held_out(run: RunConfig, each: EvalSet) -> int:
    """The maximum length in tokens of a held-out prompt with its response.

    A prompt without a limit counts as long as one of training.
    """
    prompt = run.data.rollout_max_prompt_len or 0 if each.max_prompt_len is None else each.max_prompt_len
    return prompt + each.max_response_len


def _flag_set(run: RunConfig, name: str, path: Path) -> EvalSet:
    rollout, evaluation = run.rollout, run.evaluation
    keys = {
        "input_key": evaluation.eval_input_key,
        "label_key": evaluation.eval_label_key,
        "tool_key": evaluation.eval_tool_key,
    }
    return EvalSet(
        name=name,
        origin="",
        path=path,
        n_samples_per_eval_prompt=evaluation.n_samples_per_eval_prompt,
        temperature=eval_temperature(evaluation, rollout),
        top_p=eval_top_p(evaluation, rollout),
        top_k=eval_top_k(evaluation, rollout),
        repetition_penalty=evaluation.eval_repetition_penalty,
        max_response_len=eval_max_response_len(evaluation, rollout),
        min_new_tokens=evaluation.eval_min_new_tokens,
        max_prompt_len=evaluation.eval_max_prompt_len,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
        pass_threshold=evaluation.eval_pass_threshold,
        data=_changed(
            replace(run.data, rollout_max_prompt_len=None),
            {key: value for key, value in keys.items() if value is not None},
        ),
        reward=_with_eval_key(run.reward),
    )


def _file_set(run: RunConfig, entry: EvalEntry) -> EvalSet:
    """Return a set of the file: what it does not give comes from the flags."""
    base = _flag_set(run, entry.name, entry.path)
    of_area: dict[str, dict[str, Any]] = {"data": {}, "reward": {}}
    own: dict[str, Any] = {}
    for key, value in entry.settings.items():
        of_area.get(knobs()[KEYS[key]].area, own)[key] = value
    rm_type = of_area["reward"].get("rm_type")
    if rm_type is not None:
        of_area["reward"] = _without_function(run.reward) | of_area["reward"]
    named = {} if rm_type is None else {"rm_type": rm_type}
    origin = str(run.evaluation.eval_config)
    try:
        data, reward = _changed(base.data, of_area["data"]), _changed(base.reward, of_area["reward"])
    except ConfigError as error:
        raise ConfigError("\n".join(f"{origin}: {entry.name}: {line}" for line in str(error).split("\n"))) from None
    return replace(
        base,
        **own,
        origin=origin,
        data=data,
        reward=reward,
        metadata={**named, **entry.metadata},
    )


def _without_function(reward: RewardConfig) -> dict[str, Any]:
    """Return the changes that leave out the run's function, with the key of its dict."""
    changes: dict[str, Any] = {"custom_rm_path": None, "group_rm": False}
    return changes if reward.custom_rm_path is None else {**changes, "reward_key": reward.eval_reward_key}


def _with_eval_key(reward: RewardConfig) -> RewardConfig:
    key = reward.eval_reward_key
    return reward if key is None else replace(reward, reward_key=key)


def _changed[T: (DataConfig, RewardConfig)](area: T, changes: Mapping[str, Any]) -> T:
    known = {each.name for each in fields(area)}
    return replace(area, **{name: value for name, value in changes.items() if name in known})
