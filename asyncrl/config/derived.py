"""The defaults that depend on other areas, and quantities computed from several areas.

Nothing is written back into the configuration.
"""

from datetime import datetime
from pathlib import Path
from typing import Literal

from asyncrl.config.areas import (
    ClusterConfig,
    EvalConfig,
    FailureConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from asyncrl.config.areas.rewards import BOXED, DEFAULT_KEYS, GRADE_WHOLE_TEXTS

ENGINE_RESTARTS = 3
"""The default of ``--max-engine-restarts``: covers occasional crashes, ends a run whose requests crash the engine."""
TRAINER_RESTARTS = 3
"""The default of ``--max-trainer-restarts``: covers crashes in a row, ends a run whose batch crashes its trainer."""

UNRECORDED_BACKENDS = ("experimental_sgl_trtllm", "flashinfer_mxfp4", "flashinfer_trtllm", "triton_kernel")
"""Values of SGLang's ``--moe-runner-backend`` whose choice of experts never leaves the kernel (SGLang 0.5.16)."""
_MOVES_CACHE = "moves cached tokens without their experts"
UNRECORDED_FLAGS = {
    "enable-hierarchical-cache": _MOVES_CACHE,
    "enable-lmcache": _MOVES_CACHE,
    "enable-flexkv": _MOVES_CACHE,
    "radix-cache-backend": "may move cached tokens without their experts",
    "enable-two-batch-overlap": "overwrites the experts of one half of a batch with those of the other",
}
"""SGLang's other flags with which its record of experts is wrong without an error, and the reasons (SGLang 0.5.16)."""


def num_steps_per_rollout(train: TrainConfig, rollout: RolloutConfig) -> int:
    """The number of optimizer updates per training step."""
    if train.num_steps_per_rollout is not None:
        return train.num_steps_per_rollout
    if train.global_batch_size is not None:
        return max(1, rollout.samples_per_step // train.global_batch_size)
    return 1


def global_batch_size(train: TrainConfig, rollout: RolloutConfig) -> int:
    """The number of samples per optimizer update."""
    return train.global_batch_size or rollout.samples_per_step // num_steps_per_rollout(train, rollout)


def use_dynamic_batch_size(train: TrainConfig) -> bool:
    """Whether microbatches are filled by number of tokens instead of number of samples."""
    return train.micro_batch_size is None if train.use_dynamic_batch_size is None else train.use_dynamic_batch_size


def prompt_limit(run: RunConfig) -> int | None:
    """The maximum length of a prompt in tokens by the run's flags; None without one."""
    context = run.episodes.rollout_max_context_len
    if run.data.rollout_max_prompt_len is not None or context is None:
        return run.data.rollout_max_prompt_len
    return context - 1  # slime's default: a response has at least one token


def longest_sample(run: RunConfig, response: int) -> int:
    """The maximum length in tokens of a prompt with its response; a prompt without a limit counts as 0."""
    return (run.data.rollout_max_prompt_len or 0) + response


def num_ranks(run: RunConfig) -> int:
    """Return the number of trainer ranks that start; 0 in a run without a trainer."""
    return 0 if run.debug.debug_rollout_only else run.cluster.num_trainer_ranks


def row_tokens(run: RunConfig) -> int:
    """The maximum number of tokens of a microbatch, summed over the context-parallel ranks that split it."""
    longest = longest_sample(run, run.rollout.rollout_max_response_len)
    if run.episodes.has_episodes and run.episodes.rollout_max_context_len is not None:
        longest = run.episodes.rollout_max_context_len  # all turns and observations
    if use_dynamic_batch_size(run.train):
        return max(longest, run.train.max_tokens_per_gpu * run.parallel.context_parallel_size)
    return longest * (run.train.micro_batch_size or 1)


def num_known_ids(train: TrainConfig, vocab_size: int) -> int:
    """Return the number of likeliest ids that engines return for each token; 0 without score centering.

    A vocabulary smaller than --score-centering-top-k is known whole.
    """
    return min(train.score_centering_top_k, vocab_size) if train.use_score_centering else 0


def use_rollout_logprobs(train: TrainConfig, rollout: RolloutConfig) -> bool:
    """Whether the ratio is against the log-probs of the engine that sampled."""
    if train.use_rollout_logprobs is not None:
        return train.use_rollout_logprobs
    return rollout.staleness > 0 and not train.use_tis


def routing_replay_obstacle(run: RunConfig) -> str | None:
    """The flag with which SGLang does not record the experts of each token, and the reason; None without one."""
    flags = run.sglang
    backend = flags.get("moe-runner-backend")
    if backend in UNRECORDED_BACKENDS:
        return f"sglang-moe-runner-backend {backend} chooses experts inside its kernel"
    return next((f"sglang-{name} {reason}" for name, reason in UNRECORDED_FLAGS.items() if flags.get(name)), None)


def use_routing_replay(run: RunConfig, *, is_mixture: bool) -> bool:
    """Whether the trainer routes tokens as the engine did; ``is_mixture``: whether the model has experts."""
    given = run.rollout.use_rollout_routing_replay
    return is_mixture and (routing_replay_obstacle(run) is None if given is None else given)


def normalize_advantages(train: TrainConfig) -> bool:
    """Whether advantages are whitened over the step."""
    if train.normalize_advantages is not None:
        return train.normalize_advantages
    return train.advantage_estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


def dtype(model: ModelConfig, device: Literal["cpu", "cuda"]) -> Literal["float32", "bfloat16"]:
    """The dtype of weights and activations."""
    if model.dtype != "auto":
        return model.dtype
    return "bfloat16" if device == "cuda" else "float32"


def weight_bytes(model: ModelConfig) -> int:
    """The bytes of one trainer weight on GPUs."""
    return 4 if model.dtype == "float32" else 2


def has_critic(train: TrainConfig) -> bool:
    """Whether a critic is trained in addition to the policy."""
    return train.advantage_estimator == "ppo"


def uses_reference(train: TrainConfig) -> bool:
    """Whether the run needs a reference model."""
    return train.use_kl_loss or train.kl_coef > 0


def critic_load(train: TrainConfig, model: ModelConfig) -> Path:
    """The folder of the critic's initial weights."""
    return train.critic_load or model.hf_checkpoint


def critic_lr(train: TrainConfig) -> float:
    """The learning rate of the critic."""
    return train.lr if train.critic_lr is None else train.critic_lr


def lr_decay_iters(train: TrainConfig, rollout: RolloutConfig) -> int:
    """The training step at which the decay of the learning rate ends."""
    return train.lr_decay_iters or rollout.num_rollout


def lr_warmup_iters(train: TrainConfig, decay_iters: int) -> int:
    """The number of training steps of the policy's warm-up, for a decay that ends at step ``decay_iters``."""
    return train.lr_warmup_iters if train.lr_warmup_fraction is None else round(train.lr_warmup_fraction * decay_iters)


def ref_load(train: TrainConfig, model: ModelConfig) -> Path:
    """The folder of the reference model."""
    return train.ref_load or model.hf_checkpoint


def eps_clip_high(train: TrainConfig) -> float:
    """The upper clip range of the probability ratio."""
    return train.eps_clip if train.eps_clip_high is None else train.eps_clip_high


def reward_key(reward: RewardConfig) -> str | None:
    """The entry of a dict reward that is the reward."""
    if reward.reward_key is not None or reward.custom_rm_path is not None:
        return reward.reward_key
    return DEFAULT_KEYS.get((reward.rm_type or "").removeprefix(BOXED))


def skip_special_tokens(rollout: RolloutConfig, reward: RewardConfig) -> bool:
    """Whether special tokens are left out of a response's text.

    The rewards of GRADE_WHOLE_TEXTS would count them as words of the response.  For all other rewards the default is
    slime's; rows that name one of GRADE_WHOLE_TEXTS are then graded without special tokens.
    """
    if rollout.rollout_skip_special_tokens is not None:
        return rollout.rollout_skip_special_tokens
    return reward.custom_rm_path is None and reward.rm_type in GRADE_WHOLE_TEXTS


def eval_temperature(evaluation: EvalConfig, rollout: RolloutConfig) -> float:
    """The sampling temperature in evaluation; 0 is greedy."""
    return rollout.rollout_temperature if evaluation.eval_temperature is None else evaluation.eval_temperature


def eval_top_p(evaluation: EvalConfig, rollout: RolloutConfig) -> float:
    """The top-p of nucleus sampling in evaluation."""
    return rollout.rollout_top_p if evaluation.eval_top_p is None else evaluation.eval_top_p


def eval_top_k(evaluation: EvalConfig, rollout: RolloutConfig) -> int:
    """The top-k of sampling in evaluation."""
    return rollout.rollout_top_k if evaluation.eval_top_k is None else evaluation.eval_top_k


def eval_max_response_len(evaluation: EvalConfig, rollout: RolloutConfig) -> int:
    """The maximum length of one response in evaluation, in tokens."""
    return evaluation.eval_max_response_len or rollout.rollout_max_response_len


def max_engine_restarts(failures: FailureConfig, cluster: ClusterConfig) -> int:
    """The maximum number of restarts of one engine within an hour.

    The default is 0 with ``--colocate``: an engine cannot start while the trainer holds its GPUs.
    """
    if failures.max_engine_restarts is not None:
        return failures.max_engine_restarts
    return 0 if cluster.colocate else ENGINE_RESTARTS


def trainer_restart_obstacle(run: RunConfig) -> str | None:
    """Return the reason why the run's trainer cannot be restarted within the run; None if it can."""
    if run.cluster.colocate:
        return "with colocate, the trainer's ranks cannot start while engines have their GPUs"
    if run.checkpoint.save is None or not run.checkpoint.journal:
        return "a restart needs the checkpoints and the journal of --save"
    if not run.checkpoint.save_optim:
        return "without save-optim, checkpoints lack the optimizer's state"
    return None


def max_trainer_restarts(run: RunConfig) -> int:
    """The maximum number of restarts of the trainer between two completed steps.

    The default is 0 where the trainer cannot be restarted.
    """
    if run.failures.max_trainer_restarts is not None:
        return run.failures.max_trainer_restarts
    return TRAINER_RESTARTS if trainer_restart_obstacle(run) is None else 0


def run_dir(run: RunConfig, now: datetime) -> Path:
    """The run's output folder.  Call this once per run: the default contains the time."""
    return run.output.run_dir or Path.cwd() / "runs" / f"{run.name}-{now:%Y%m%d-%H%M%S}"


def filled_in(run: RunConfig) -> dict[str, object]:
    """The effective value of each setting that was left to a derived default, by the setting's name."""
    train, rollout, evaluation = run.train, run.rollout, run.evaluation
    meant = {
        "rollout-num-gpus": (run.cluster.rollout_num_gpus, run.cluster.num_rollout_gpus),
        "max-engine-restarts": (run.failures.max_engine_restarts, max_engine_restarts(run.failures, run.cluster)),
        "num-data-workers": (run.data.num_data_workers, run.data.num_workers),
        "max-staleness": (rollout.max_staleness, rollout.staleness),
        "eps-clip-high": (train.eps_clip_high, eps_clip_high(train)),
        "normalize-advantages": (train.normalize_advantages, normalize_advantages(train)),
        "use-dynamic-batch-size": (train.use_dynamic_batch_size, use_dynamic_batch_size(train)),
        "use-rollout-logprobs": (train.use_rollout_logprobs, use_rollout_logprobs(train, rollout)),
        "global-batch-size": (train.global_batch_size, global_batch_size(train, rollout)),
        "num-steps-per-rollout": (train.num_steps_per_rollout, num_steps_per_rollout(train, rollout)),
        "lr-decay-iters": (train.lr_decay_iters, lr_decay_iters(train, rollout)),
        "rollout-skip-special-tokens": (
            rollout.rollout_skip_special_tokens,
            skip_special_tokens(rollout, run.reward),
        ),
        "eval-temperature": (evaluation.eval_temperature, eval_temperature(evaluation, rollout)),
        "eval-top-p": (evaluation.eval_top_p, eval_top_p(evaluation, rollout)),
        "eval-top-k": (evaluation.eval_top_k, eval_top_k(evaluation, rollout)),
        "eval-max-response-len": (evaluation.eval_max_response_len, eval_max_response_len(evaluation, rollout)),
    }
    return {name: value for name, (given, value) in meant.items() if given is None}
