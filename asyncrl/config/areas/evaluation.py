"""The evaluation on held-out prompts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from asyncrl.config.areas.ranges import above, at_least, must, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalEntry:
    """One set in the file of ``--eval-config``."""

    name: str
    path: Path
    settings: Mapping[str, Any]
    """The given values by key of the file, with the file's defaults filled in."""
    metadata: Mapping[str, Any]
    """Values that replace those in the metadata of every row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """The evaluation on held-out prompts."""

    eval_interval: Annotated[
        int | None,
        "Number of training steps between evaluations, the first of which runs before training. Default: never.",
    ] = None
    eval_prompt_data: Annotated[tuple[str, ...], "Held-out prompts: NAME PATH pairs of JSONL files."] = ()
    eval_config: Annotated[
        Path | None,
        "YAML or TOML file of named sets of held-out prompts, each with settings that override the flags below.",
    ] = None
    eval_function_path: Annotated[
        str | None,
        "Function that replaces the evaluation, in the notation of --dynamic-sampling-filter-path. Default: built in.",
    ] = None
    eval_timeout_s: Annotated[float, "Maximum duration of one call of --eval-function-path, in seconds."] = 3600.0
    skip_eval_before_train: Annotated[bool, "Skip the evaluation before the first step."] = False
    n_samples_per_eval_prompt: Annotated[int, "Number of responses per held-out prompt."] = 1
    eval_temperature: Annotated[
        float | None, "Sampling temperature in evaluation; 0 is greedy. Default: --rollout-temperature."
    ] = None
    eval_top_p: Annotated[float | None, "Top-p of nucleus sampling in evaluation. Default: --rollout-top-p."] = None
    eval_top_k: Annotated[int | None, "Top-k of sampling in evaluation; -1 is off. Default: --rollout-top-k."] = None
    eval_repetition_penalty: Annotated[
        float, "Repetition penalty in evaluation, above 0 and at most 2; 1.0 is off."
    ] = 1.0
    eval_max_response_len: Annotated[
        int | None, "Maximum length of one response in evaluation, in tokens. Default: --rollout-max-response-len."
    ] = None
    eval_min_new_tokens: Annotated[
        int, "Minimum length of one response in evaluation, in tokens; stop strings end a response earlier."
    ] = 0
    eval_max_prompt_len: Annotated[
        int | None, "Maximum length of a held-out prompt in tokens; longer prompts are skipped. Default: no limit."
    ] = None
    eval_input_key: Annotated[str | None, "Key of the held-out prompt. Default: --input-key."] = None
    eval_label_key: Annotated[str | None, "Key of the held-out reference answer. Default: --label-key."] = None
    eval_tool_key: Annotated[str | None, "Key of the tools of a held-out prompt. Default: --tool-key."] = None
    eval_pass_threshold: Annotated[
        float | None,
        "Reward from which a response counts as right, for pass@k and majority@k. Default: 1, if all rewards of the "
        "set are -1, 0 or 1; otherwise pass@k and majority@k are not reported.",
    ] = None

    def __post_init__(self) -> None:
        names = self.eval_prompt_data[::2]
        paired = len(self.eval_prompt_data) % 2 == 0
        top_p, top_k = self.eval_top_p, self.eval_top_k
        refuse(
            at_least(self, 1, "eval_interval", "n_samples_per_eval_prompt", "eval_max_response_len")
            + at_least(self, 1, "eval_max_prompt_len")
            + at_least(self, 0, "eval_temperature", "eval_min_new_tokens")
            + above(self, 0, "eval_timeout_s")
            + must(top_p is None or 0 < top_p <= 1, f"eval-top-p must be above 0 and at most 1, got {top_p}")
            + must(
                top_k is None or top_k == -1 or top_k >= 1, f"eval-top-k must be -1 (off) or at least 1, got {top_k}"
            )
            + must(
                0 < self.eval_repetition_penalty <= 2,
                f"eval-repetition-penalty must be above 0 and at most 2, got {self.eval_repetition_penalty}",
            )
            + must(paired, f"eval-prompt-data must be NAME PATH pairs, got {len(self.eval_prompt_data)} words")
            + must(len(set(names)) == len(names), f"eval-prompt-data names must differ, got {', '.join(names)}")
            + must("" not in names, "eval-prompt-data names must not be empty")
            + [
                f"eval-prompt-data names must be printable text, got {each!a}"
                for each in names
                if not each.isprintable()
            ]
        )

    @property
    def data_sets(self) -> tuple[tuple[str, Path], ...]:
        """The name and file of each data set of ``eval_prompt_data``."""
        words = self.eval_prompt_data
        return tuple((name, Path(path)) for name, path in zip(words[::2], words[1::2], strict=True))
