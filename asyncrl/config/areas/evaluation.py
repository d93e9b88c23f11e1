"""The evaluation on held-out prompts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from asyncrl.config.areas.ranges import at_least, must, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """The evaluation on held-out prompts."""

    eval_interval: Annotated[
        int | None,
        "Number of training steps between evaluations, the first of which runs before training. Default: never.",
    ] = None
    eval_prompt_data: Annotated[tuple[str, ...], "Held-out prompts: NAME PATH pairs of JSONL files."] = ()
    skip_eval_before_train: Annotated[bool, "Skip the evaluation before the first step."] = False
    n_samples_per_eval_prompt: Annotated[int, "Number of responses per held-out prompt."] = 1
    eval_temperature: Annotated[
        float | None, "Sampling temperature in evaluation; 0 is greedy. Default: --rollout-temperature."
    ] = None
    eval_max_response_len: Annotated[
        int | None, "Maximum length of one response in evaluation, in tokens. Default: --rollout-max-response-len."
    ] = None

    def __post_init__(self) -> None:
        names = self.eval_prompt_data[::2]
        paired = len(self.eval_prompt_data) % 2 == 0
        refuse(
            at_least(self, 1, "eval_interval", "n_samples_per_eval_prompt", "eval_max_response_len")
            + at_least(self, 0, "eval_temperature")
            + must(paired, f"eval-prompt-data must be NAME PATH pairs, got {len(self.eval_prompt_data)} words")
            + must(len(set(names)) == len(names), f"eval-prompt-data names must differ, got {', '.join(names)}")
        )

    @property
    def data_sets(self) -> tuple[tuple[str, Path], ...]:
        """The name and file of each data set."""
        words = self.eval_prompt_data
        return tuple((name, Path(path)) for name, path in zip(words[::2], words[1::2], strict=True))
