"""The objective, the optimizer and the weight updates."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from asyncrl.config.areas.ranges import above, at_least, must, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The objective, the optimizer and the weight updates."""

    advantage_estimator: Annotated[
        Literal["grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"],
        "Advantage estimator, which also decides how the ratio is clipped; docs/algorithms.md has the equations.",
    ] = "grpo"
    custom_advantage_function_path: Annotated[
        str | None,
        "Function that replaces the estimator's advantages, in the notation of --dynamic-sampling-filter-path; "
        "docs/plugins.md has its signature.",
    ] = None
    custom_loss_function_path: Annotated[
        str | None,
        "Function that replaces the clipped policy loss, in the notation of --dynamic-sampling-filter-path; "
        "docs/plugins.md has its signature.",
    ] = None
    custom_tis_function_path: Annotated[
        str | None,
        "Function that replaces the weights of --use-tis, in the notation of --dynamic-sampling-filter-path; "
        "docs/plugins.md has its signature.",
    ] = None
    disable_grpo_std_normalization: Annotated[
        bool, "Do not divide a group's advantages by their standard deviation (Dr. GRPO); for grpo, gspo and cispo."
    ] = False
    normalize_advantages: Annotated[
        bool | None,
        "Whiten advantages over all tokens of the step: subtract their mean, divide by their standard deviation. "
        "Default: on for reinforce_plus_plus and reinforce_plus_plus_baseline, which require it.",
    ] = None
    turn_reward_coef: Annotated[
        float, "Coefficient of the rewards that episodes give to single turns, in the advantages; 0 ignores them."
    ] = 1.0
    gamma: Annotated[float, "Discount factor of rewards per token; for reinforce_plus_plus and ppo."] = 1.0
    lambd: Annotated[
        float, "Lambda of generalized advantage estimation: the weight of rewards against the critic's values; for ppo."
    ] = 1.0
    value_clip: Annotated[float, "Maximum change of a critic value in one step; for ppo."] = 0.2
    critic_load: Annotated[
        Path | None,
        "Folder of the critic's initial weights, in Hugging Face format; for ppo. Default: --hf-checkpoint.",
    ] = None
    critic_lr: Annotated[float | None, "Learning rate of the critic; for ppo. Default: --lr."] = None
    critic_lr_warmup_iters: Annotated[
        int, "Number of training steps over which the critic's learning rate rises linearly from 0; for ppo."
    ] = 0
    num_critic_only_steps: Annotated[int, "Number of initial training steps that train only the critic; for ppo."] = 0
    eps_clip: Annotated[float, "Lower clip range of the probability ratio."] = 0.2
    eps_clip_high: Annotated[float | None, "Upper clip range of the probability ratio. Default: --eps-clip."] = None
    eps_clip_c: Annotated[
        float | None,
        "Dual clip: upper bound of the probability ratio where the advantage is negative, above 1. Default: off.",
    ] = None
    kl_coef: Annotated[
        float,
        "Reward subtracted per nat of KL from the reference model; for reinforce_plus_plus, "
        "reinforce_plus_plus_baseline and ppo.",
    ] = 0.0
    use_kl_loss: Annotated[
        bool, "Compute the KL from the reference model in the loss and add it, weighted by --kl-loss-coef."
    ] = False
    kl_loss_coef: Annotated[float, "Coefficient of the KL in the loss."] = 0.0
    kl_loss_type: Annotated[
        Literal["k1", "k2", "k3", "low_var_kl"],
        "Estimator of the KL, in the loss and in the reward. k1 has a zero mean gradient as a loss; k3 is GRPO's.",
    ] = "k1"
    use_unbiased_kl: Annotated[bool, "Weight the KL in the loss by the probability ratio (DeepSeek-V3.2)."] = False
    ref_load: Annotated[
        Path | None,
        "Folder of the reference model, in Hugging Face format or a checkpoint. Used for KL terms, and for the "
        "policy's initial weights if --load has no checkpoint. Default: --hf-checkpoint.",
    ] = None
    entropy_coef: Annotated[
        float, "Coefficient of the policy's entropy, which is added to the maximized objective."
    ] = 0.0
    use_tis: Annotated[
        bool,
        "Weight each token's loss by the trainer's probability at the start of the step, divided by the engine's. The "
        "denominator of the clipped ratio is then the trainer's probability.",
    ] = False
    tis_mode: Annotated[
        Literal["truncate", "clip", "mask", "whole"],
        "Treatment of weights outside --tis-clip-low to --tis-clip: set to the bound (truncate or clip: TIS), set to 0 "
        "(mask: masked importance sampling, IcePop), or unchanged (whole: decoupled PPO).",
    ] = "truncate"
    tis_level: Annotated[
        Literal["token", "sequence", "geometric"],
        "Scope of a weight: one token, the whole response (sequence), or the geometric mean over the response.",
    ] = "token"
    tis_clip: Annotated[float, "Upper bound of the weights of --use-tis."] = 2.0
    tis_clip_low: Annotated[float, "Lower bound of the weights of --use-tis."] = 0.0
    use_score_centering: Annotated[
        bool,
        "Replace the clipped loss by REINFORCE with centered scores, which takes out the drift of stale or inexact "
        "sampling. The weights of --use-tis apply.",
    ] = False
    score_centering_top_k: Annotated[
        int,
        "Number of likeliest tokens, for each generated one, that engines return for --use-score-centering; 8 bytes "
        "each in the driver's memory.  A smaller vocabulary is returned whole.",
    ] = 128
    use_opsm: Annotated[
        bool,
        "Leave out responses with negative advantage that the policy has moved away from (off-policy sequence "
        "masking).",
    ] = False
    opsm_delta: Annotated[
        float, "Threshold of --use-opsm in nats per token: mean log-prob under the engine minus that under the policy."
    ] = 1e-4
    calculate_per_token_loss: Annotated[
        bool, "Average the loss over all tokens. If off, average over the samples of each rollout first."
    ] = False
    use_rollout_logprobs: Annotated[
        bool | None,
        "Divide by the engine's probabilities in the policy ratio, which corrects for stale data. If off, divide by "
        "the trainer's probabilities at the start of the step. Default: on unless --max-staleness is 0 or --use-tis "
        "is given.",
    ] = None
    global_batch_size: Annotated[
        int | None,
        "Number of samples per optimizer update; several samples of one episode count once. Default: the whole step.",
    ] = None
    num_steps_per_rollout: Annotated[
        int | None, "Number of optimizer updates per training step. Default: 1, or what --global-batch-size implies."
    ] = None
    use_dynamic_batch_size: Annotated[
        bool | None,
        "Fill microbatches with samples up to --max-tokens-per-gpu. Default: on unless --micro-batch-size is given.",
    ] = None
    max_tokens_per_gpu: Annotated[
        int, "Maximum number of tokens in one packed microbatch, per GPU. A longer sample gets a separate microbatch."
    ] = 8192
    micro_batch_size: Annotated[
        int | None,
        "Number of samples per microbatch, packed regardless of length. Default: 1 with --no-use-dynamic-batch-size.",
    ] = None
    balance_data: Annotated[
        bool, "Balance the number of tokens over trainer ranks. If off, each rank gets every n-th sample."
    ] = False
    lr: Annotated[float, "AdamW learning rate."] = 1e-6
    lr_warmup_iters: Annotated[int, "Number of training steps over which the learning rate rises linearly from 0."] = 0
    lr_warmup_fraction: Annotated[
        float | None, "Warm-up as a fraction of --lr-decay-iters, in whole training steps. Default: --lr-warmup-iters."
    ] = None
    lr_decay_style: Annotated[
        Literal["constant", "cosine", "linear"],
        "Learning rate after the warm-up: constant, or a decay to --min-lr; also of the critic.",
    ] = "constant"
    lr_decay_iters: Annotated[
        int | None,
        "Training step at which the decay of the learning rate ends, counted with the warm-up. Default: --num-rollout.",
    ] = None
    min_lr: Annotated[float, "Learning rate at the end of its decay."] = 0.0
    weight_decay: Annotated[float, "AdamW weight decay."] = 0.01
    adam_beta1: Annotated[float, "AdamW beta1."] = 0.9
    adam_beta2: Annotated[float, "AdamW beta2."] = 0.98
    adam_eps: Annotated[float, "AdamW epsilon."] = 1e-8
    clip_grad: Annotated[float, "Maximum gradient norm; 0 is off."] = 1.0
    update_weight_transport: Annotated[
        Literal["nccl", "disk"],
        "Transport of weights to the engines: nccl broadcasts (with gloo on CPUs); disk writes files, for engines "
        "that no process group can reach.",
    ] = "nccl"
    update_weight_disk_dir: Annotated[
        Path | None,
        "Folder that trainer, engines and driver share; for --update-weight-transport disk. A new folder in it holds "
        "at most two sets of weights.",
    ] = None
    update_weight_buffer_size: Annotated[
        int, "Size of one bucket of a weight update, in bytes. Each engine keeps two buffers of this size."
    ] = 512 * 1024**2
    update_weights_during_training: Annotated[
        bool | None,
        "Copy the weights on the trainer's first GPU, so that training continues while they are sent. Default: on "
        "where the copy takes at most a tenth of that GPU's memory and everything else still fits.",
    ] = None
    check_weight_updates: Annotated[
        bool, "Compare every update, and the engines' weights after it, with what the trainer sent."
    ] = False
    check_fast_step: Annotated[
        bool,
        "Before training, compare kernels and other fast operations of a training step with their plain forms, with "
        "random inputs of this run's sizes. The run ends if one differs.",
    ] = False

    def __post_init__(self) -> None:
        betas = {"adam-beta1": self.adam_beta1, "adam-beta2": self.adam_beta2}
        refuse(
            above(self, 0, "eps_clip", "eps_clip_high", "lr", "adam_eps", "tis_clip")
            + above(self, 1, "eps_clip_c")
            + at_least(self, 0, "kl_coef", "kl_loss_coef", "entropy_coef", "tis_clip_low", "opsm_delta")
            + at_least(self, 0, "turn_reward_coef")
            + above(self, 0, "value_clip", "critic_lr")
            + at_least(self, 0, "critic_lr_warmup_iters", "num_critic_only_steps")
            + must(0 <= self.gamma <= 1, f"gamma must be at least 0 and at most 1, got {self.gamma}")
            + must(0 <= self.lambd <= 1, f"lambd must be at least 0 and at most 1, got {self.lambd}")
            + at_least(self, 0, "lr_warmup_iters", "lr_warmup_fraction", "min_lr", "weight_decay", "clip_grad")
            + must(
                (self.lr_warmup_fraction or 0) < 1, f"lr-warmup-fraction must be below 1, got {self.lr_warmup_fraction}"
            )
            + at_least(self, 1, "global_batch_size", "num_steps_per_rollout", "max_tokens_per_gpu", "lr_decay_iters")
            + at_least(self, 1, "micro_batch_size")
            + at_least(self, 1, "update_weight_buffer_size", "score_centering_top_k")
            + [f"{name} must be at least 0 and below 1, got {b}" for name, b in betas.items() if not 0 <= b < 1]
        )
