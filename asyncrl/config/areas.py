"""The settings of a run: one frozen dataclass per area.

A field's name, with ``-`` for ``_``, is its flag and its TOML key.  The string in its annotation is its help text.
slime's names and meanings hold wherever the feature exists.  ``__post_init__`` checks the range of each field.
``problems.py`` finds contradictions between fields and missing files; ``derived.py`` computes defaults that depend on
other areas.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from asyncrl.config.parallel import ParallelConfig
from asyncrl.config.ranges import above, at_least, must, refuse
from asyncrl.config.shape_flags import ShapeConfig

TransformerImpl = Literal["auto", "local", "transformer_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model and its number format."""

    hf_checkpoint: Annotated[
        Path,
        "Model folder in Hugging Face format: config.json, tokenizer, safetensors. Block-FP8 checkpoints are served "
        "as is; the trainer starts from the dequantized weights, unless --load or --ref-load provides others.",
    ]
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        "Data type of weights and activations. auto is bfloat16 on GPUs and float32 on CPUs, where bfloat16 is 4-6 "
        "times slower.",
    ] = "auto"
    transformer_impl: Annotated[
        TransformerImpl,
        "Implementation of the trainer's layers: Megatron's own (local), or TransformerEngine's, which fuses norms "
        "and activations with adjacent operations, needs GPUs and must be installed. auto is TransformerEngine in "
        "bfloat16 where it is available, else local.",
    ] = "auto"
    seed: Annotated[int, "Random seed of the trainer and of sampling in the rollout engines."] = 1234

    def __post_init__(self) -> None:
        refuse(must(0 <= self.seed < 2**31, f"seed must be at least 0 and below 2**31, got {self.seed}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The nodes and GPUs of trainer and engines."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], "Device of trainer and engines. auto is GPUs if Ray offers any, else CPUs."
    ] = "auto"
    actor_num_nodes: Annotated[int, "Number of trainer nodes."] = 1
    actor_num_gpus_per_node: Annotated[
        int, "Number of trainer ranks per node: one GPU each, or one process each on CPUs."
    ] = 1
    rollout_num_gpus: Annotated[
        int | None,
        "Number of GPUs of all rollout engines together; on CPUs, number of engines. Default: 1, or the trainer's "
        "number with --colocate.",
    ] = None
    rollout_num_gpus_per_engine: Annotated[int, "Number of GPUs of one engine (its tensor-parallel size)."] = 1
    colocate: Annotated[
        bool,
        "Share the same GPUs between trainer and engines, which alternate: each frees its memory while the other "
        "works. Requires synchronous training (--max-staleness 0).",
    ] = False
    use_router: Annotated[
        bool, "Place sglang-router in front of the engines. If off, requests are spread over the engines in rotation."
    ] = True
    start_timeout_s: Annotated[float, "Time limit for all processes to become ready, in seconds."] = 600.0
    distributed_timeout_minutes: Annotated[float, "Time limit for one collective operation, in minutes."] = 10.0
    gpu_memory_gb: Annotated[
        float,
        "Memory of one GPU in GB (10^9 bytes), for --dry-run. The default is an H200's data sheet; its driver shows "
        "7% more.",
    ] = 141.0

    def __post_init__(self) -> None:
        refuse(
            at_least(self, 1, "actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus")
            + at_least(self, 1, "rollout_num_gpus_per_engine")
            + above(self, 0, "start_timeout_s", "distributed_timeout_minutes", "gpu_memory_gb")
        )

    @property
    def num_trainer_ranks(self) -> int:
        """The number of trainer ranks over all nodes."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def num_rollout_gpus(self) -> int:
        """The number of GPUs of all rollout engines together."""
        if self.rollout_num_gpus is not None:
            return self.rollout_num_gpus
        return self.num_trainer_ranks if self.colocate else 1

    @property
    def num_engines(self) -> int:
        """The number of rollout engines, on GPUs or CPUs."""
        return self.num_rollout_gpus // self.rollout_num_gpus_per_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The training prompts."""

    prompt_data: Annotated[Path, "JSONL file of training prompts, one object per line."]
    input_key: Annotated[str, "Key of the prompt: a string, or chat messages with --apply-chat-template."] = "input"
    label_key: Annotated[str | None, "Key of the reference answer."] = None
    metadata_key: Annotated[str | None, "Key of an object that rewards and filters receive unchanged."] = None
    apply_chat_template: Annotated[bool, "Render chat messages with the tokenizer's chat template."] = False
    rollout_shuffle: Annotated[bool, "Shuffle the prompts in each epoch."] = False
    rollout_seed: Annotated[int, "Random seed of --rollout-shuffle."] = 42
    rollout_max_prompt_len: Annotated[
        int | None,
        "Maximum prompt length in tokens. Longer prompts are skipped and counted in the log. Default: no limit.",
    ] = None

    def __post_init__(self) -> None:
        refuse(
            at_least(self, 1, "rollout_max_prompt_len")
            + at_least(self, 0, "rollout_seed")
            + must(self.input_key != "", "input-key must not be empty")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """The generation of samples, their rewards, and the staleness bound."""

    num_rollout: Annotated[int, "Number of training steps in the run (slime's name: one rollout batch per step)."]
    rollout_batch_size: Annotated[int, "Number of prompts (groups) per training step."]
    n_samples_per_prompt: Annotated[int, "Number of samples per group."] = 1
    rollout_temperature: Annotated[float, "Sampling temperature, above 0."] = 1.0
    rollout_top_p: Annotated[float, "Top-p of nucleus sampling; 1.0 is off."] = 1.0
    rollout_top_k: Annotated[int, "Top-k of sampling; -1 is off."] = -1
    rollout_max_response_len: Annotated[int, "Maximum length of one response in tokens."] = 1024
    rollout_stop: Annotated[tuple[str, ...], "Stop strings: texts that end a response."] = ()
    rollout_stop_token_ids: Annotated[
        tuple[int, ...], "Ids of tokens that end a response, in addition to the model's end token."
    ] = ()
    sglang_server_concurrency: Annotated[int, "Maximum number of samples in flight per rollout engine."] = 512
    update_weights_interval: Annotated[int, "Number of training steps between weight updates of the engines."] = 1
    max_staleness: Annotated[
        int | None,
        "Maximum age of a trained token, in training steps; 0 is synchronous training. Default: "
        "--update-weights-interval.",
    ] = None
    stale_policy: Annotated[
        Literal["wait", "mask", "drop"],
        "Action when a group that is due now is unfinished: wait for it, mask its tokens that are too old "
        "out of the loss later, or drop it and start its prompt again.",
    ] = "wait"
    weight_update_mode: Annotated[
        Literal["in_place", "retract", "abort"],
        "Effect of a weight update on samples in flight: they keep their KV cache (in_place), recompute it "
        "(retract), or are aborted and resubmitted with their tokens so far (abort).",
    ] = "in_place"
    dynamic_sampling_filter_path: Annotated[
        str | None,
        "Function that decides which groups are kept, as dotted.path, module:function or file.py:function. Default: "
        "keep all.",
    ] = None
    over_sampling_batch_size: Annotated[
        int | None,
        "Maximum number of groups in flight per --rollout-batch-size groups needed. Default: as many as the filter's "
        "recent acceptance rate requires; with --stale-policy drop, no more than needed.",
    ] = None
    async_buffer_size: Annotated[
        int | None,
        "Maximum number of groups that wait for training, including groups in flight that will join them. Default: as "
        "many as --max-staleness allows.",
    ] = None
    buffer_filter_path: Annotated[
        str | None,
        "Function that picks the groups of a batch from the waiting groups, in the notation of "
        "--dynamic-sampling-filter-path. Default: oldest first.",
    ] = None
    partial_rollout: Annotated[
        bool,
        "Interrupt groups that would exceed the staleness bound, keep their tokens, and resume them under newer "
        "weights.",
    ] = False
    mask_offpolicy_in_partial_rollout: Annotated[
        bool, "Train a resumed group only on the tokens generated after its last resume; requires --partial-rollout."
    ] = False
    follow_kv_cache: Annotated[bool, "Limit the samples in flight to what the engines' KV caches can hold."] = False
    custom_rm_path: Annotated[
        str | None,
        "Reward function, in the notation of --dynamic-sampling-filter-path. Takes precedence over --rm-type.",
    ] = None
    rm_type: Annotated[
        Literal["number", "exact"] | None,
        "Built-in reward: number compares the last number in the response with the label; exact compares the "
        "stripped texts.",
    ] = None

    def __post_init__(self) -> None:
        top_p, top_k = self.rollout_top_p, self.rollout_top_k
        refuse(
            at_least(self, 1, "num_rollout", "rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len")
            + above(self, 0, "rollout_temperature")
            + must(0 < top_p <= 1, f"rollout-top-p must be above 0 and at most 1, got {top_p}")
            + must(top_k == -1 or top_k >= 1, f"rollout-top-k must be -1 (off) or at least 1, got {top_k}")
            + at_least(self, 1, "sglang_server_concurrency", "update_weights_interval")
            + at_least(self, 1, "over_sampling_batch_size", "async_buffer_size")
            + at_least(self, 0, "max_staleness")
            + must("" not in self.rollout_stop, "rollout-stop must not contain an empty string")
        )

    @property
    def staleness(self) -> int:
        """The maximum number of steps between generating a token and training on it."""
        return self.update_weights_interval if self.max_staleness is None else self.max_staleness

    @property
    def samples_per_step(self) -> int:
        """The number of samples of one training step."""
        return self.rollout_batch_size * self.n_samples_per_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureConfig:
    """The limits on failures and waiting times."""

    max_sample_retries: Annotated[
        int, "Maximum number of retries of a sample whose engine failed; tokens generated so far are kept."
    ] = 3
    max_engine_restarts: Annotated[
        int | None,
        "Maximum number of engine restarts in the run, over all engines; a failed restart is retried and counts. The "
        "next failure ends the run. Default: 3, or 0 with --colocate.",
    ] = None
    max_failed_groups: Annotated[int, "Number of failed groups in a row that ends the run."] = 16
    max_filtered_groups: Annotated[int, "Number of filtered groups in a row that ends the run."] = 1024
    request_timeout_s: Annotated[float, "Time without a token after which a request times out, in seconds."] = 300.0
    control_timeout_s: Annotated[float, "Time limit for one engine pause, update or continue, in seconds."] = 120.0
    reward_timeout_s: Annotated[float, "Time limit for one call of the reward function, in seconds."] = 60.0
    train_timeout_s: Annotated[float, "Time limit for one training step or save, in seconds."] = 3600.0
    watchdog_timeout_s: Annotated[
        float, "Time without a token or group after which a run whose trainer waits ends, in seconds."
    ] = 1800.0

    def __post_init__(self) -> None:
        refuse(
            at_least(self, 0, "max_sample_retries", "max_engine_restarts")
            + at_least(self, 1, "max_failed_groups", "max_filtered_groups")
            + above(self, 0, "request_timeout_s", "control_timeout_s", "reward_timeout_s", "train_timeout_s")
            + above(self, 0, "watchdog_timeout_s")
        )


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
    disable_grpo_std_normalization: Annotated[
        bool, "Do not divide a group's advantages by their standard deviation (Dr. GRPO); for grpo, gspo and cispo."
    ] = False
    normalize_advantages: Annotated[
        bool | None,
        "Whiten advantages over all tokens of the step: subtract their mean, divide by their standard deviation. "
        "Default: on for reinforce_plus_plus and reinforce_plus_plus_baseline, which require it.",
    ] = None
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
        Literal["truncate", "mask", "whole"],
        "Treatment of weights outside --tis-clip-low to --tis-clip: set to the bound (truncate: TIS), set to 0 "
        "(mask: masked importance sampling, IcePop), or unchanged (whole: decoupled PPO).",
    ] = "truncate"
    tis_level: Annotated[
        Literal["token", "sequence", "geometric"],
        "Scope of a weight: one token, the whole response (sequence), or the geometric mean over the response.",
    ] = "token"
    tis_clip: Annotated[float, "Upper bound of the weights of --use-tis."] = 2.0
    tis_clip_low: Annotated[float, "Lower bound of the weights of --use-tis."] = 0.0
    use_opsm: Annotated[
        bool,
        "Leave out responses with negative advantage that the policy has moved away from (off-policy sequence "
        "masking).",
    ] = False
    opsm_delta: Annotated[
        float, "Threshold of --use-opsm in nats per token: mean log-prob under the engine minus that under the policy."
    ] = 1e-4
    calculate_per_token_loss: Annotated[
        bool, "Average the loss over all tokens. If off, average over each sample first."
    ] = False
    use_rollout_logprobs: Annotated[
        bool | None,
        "Divide by the engine's probabilities in the policy ratio, which corrects for stale data. If off, divide by "
        "the trainer's probabilities at the start of the step. Default: on unless --max-staleness is 0 or --use-tis "
        "is given.",
    ] = None
    global_batch_size: Annotated[int | None, "Number of samples per optimizer update. Default: the whole step."] = None
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

    def __post_init__(self) -> None:
        betas = {"adam-beta1": self.adam_beta1, "adam-beta2": self.adam_beta2}
        refuse(
            above(self, 0, "eps_clip", "eps_clip_high", "lr", "adam_eps", "tis_clip")
            + above(self, 1, "eps_clip_c")
            + at_least(self, 0, "kl_coef", "kl_loss_coef", "entropy_coef", "tis_clip_low", "opsm_delta")
            + above(self, 0, "value_clip", "critic_lr")
            + at_least(self, 0, "critic_lr_warmup_iters", "num_critic_only_steps")
            + must(0 <= self.gamma <= 1, f"gamma must be at least 0 and at most 1, got {self.gamma}")
            + must(0 <= self.lambd <= 1, f"lambd must be at least 0 and at most 1, got {self.lambd}")
            + at_least(self, 0, "lr_warmup_iters", "weight_decay", "clip_grad")
            + at_least(self, 1, "global_batch_size", "num_steps_per_rollout", "max_tokens_per_gpu")
            + at_least(self, 1, "micro_batch_size")
            + at_least(self, 1, "update_weight_buffer_size")
            + [f"{name} must be at least 0 and below 1, got {b}" for name, b in betas.items() if not 0 <= b < 1]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """The checkpoints to save and to resume from."""

    save: Annotated[Path | None, "Folder for checkpoints. Default: none are written."] = None
    save_interval: Annotated[
        int | None, "Number of training steps between checkpoints; the last step is saved in any case."
    ] = None
    async_save: Annotated[
        bool, "Continue training while a checkpoint is written; training waits only for the copy in host memory."
    ] = True
    save_optim: Annotated[bool, "Save the optimizer state. If off, a resumed run starts with a fresh one."] = True
    load: Annotated[
        Path | None,
        "Folder of checkpoints; training resumes from the newest. If there is none, training starts from the weights "
        "of --ref-load, and without it from --hf-checkpoint.",
    ] = None
    ckpt_step: Annotated[int | None, "Training step of the checkpoint to resume from. Default: the newest."] = None
    load_optim: Annotated[bool, "Load the optimizer state."] = True

    def __post_init__(self) -> None:
        refuse(at_least(self, 1, "save_interval", "ckpt_step"))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """The output of a run."""

    run_dir: Annotated[
        Path | None,
        "Output folder. Default: runs/NAME-DATE-TIME, where NAME is the TOML file's or else the model folder's.",
    ] = None
    use_tensorboard: Annotated[bool, "Write TensorBoard events."] = True
    timeline: Annotated[bool, "Write timeline.json, a trace that Perfetto opens."] = True
    progress: Annotated[
        Literal["auto", "live", "lines"],
        "Progress display: live redraws a table, lines prints one line per step. auto is live on a terminal, else "
        "lines.",
    ] = "auto"
    dry_run: Annotated[
        bool,
        "Start nothing: check every setting, show the run's memory per GPU, and refuse what cannot fit. Needs no GPU "
        "and, of the model, only config.json.",
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The whole run.  Pass a function the area or the value that it needs, not this."""

    name: str
    """The TOML file's name without its suffix, or the model folder's name without a file."""
    model: ModelConfig
    shape: ShapeConfig
    cluster: ClusterConfig
    parallel: ParallelConfig
    data: DataConfig
    rollout: RolloutConfig
    failures: FailureConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    evaluation: EvalConfig
    output: OutputConfig
    sglang: dict[str, str | bool] = field(default_factory=dict)
    """The SGLang server's flags by name without ``--sglang-``; True is a flag without a value."""
    router: dict[str, str | bool] = field(default_factory=dict)
    """The router's flags by name without ``--router-``."""
