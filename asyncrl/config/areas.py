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
from asyncrl.config.shape import ShapeConfig

TransformerImpl = Literal["auto", "local", "transformer_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model."""

    hf_checkpoint: Annotated[
        Path,
        "Folder in Hugging Face format: config.json, tokenizer, safetensors. In fp8 in blocks, engines serve "
        "it so, and the trainer begins with the numbers that it stands for, unless --load or --ref-load has "
        "others.",
    ]
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        "Of weights and activations; auto is bfloat16 on GPUs and float32 on a CPU, where bfloat16 is 4-6 "
        "times slower.",
    ] = "auto"
    transformer_impl: Annotated[
        TransformerImpl,
        "The trainer's layers: Megatron's own, or TransformerEngine's, which must be installed, need GPUs, "
        "and fuse norms and activations with what is beside them. auto takes those where they can be had, in "
        "bfloat16.",
    ] = "auto"
    seed: Annotated[int, "Of the trainer and of the draws of the rollout engines."] = 1234

    def __post_init__(self) -> None:
        refuse(must(0 <= self.seed < 2**31, f"seed must be at least 0 and below 2**31, got {self.seed}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Where things run."""

    device: Annotated[Literal["auto", "cpu", "cuda"], "auto takes GPUs where Ray offers them."] = "auto"
    actor_num_nodes: Annotated[int, "Nodes of the trainer."] = 1
    actor_num_gpus_per_node: Annotated[int, "Trainer ranks per node; on a CPU, processes."] = 1
    rollout_num_gpus: Annotated[
        int | None,
        "GPUs of all rollout engines together; on a CPU, engines. Default: 1, with --colocate the trainer's.",
    ] = None
    rollout_num_gpus_per_engine: Annotated[int, "GPUs of one engine (its tensor parallel size)."] = 1
    colocate: Annotated[
        bool,
        "Trainer and engines have the same GPUs, in turns: each gives its memory back while the other works. "
        "Such a run is synchronous (--max-staleness 0).",
    ] = False
    use_router: Annotated[
        bool, "Put sglang-router in front of the engines; without it requests go to the engines in turn."
    ] = True
    start_timeout_s: Annotated[float, "Until every process must be ready, in seconds."] = 600.0
    distributed_timeout_minutes: Annotated[float, "For one collective operation, in minutes."] = 10.0
    gpu_memory_gb: Annotated[
        float,
        "Of one GPU, in 10^9 bytes, for --dry-run. The default is an H200's data sheet; its driver shows 6% more.",
    ] = 141.0

    def __post_init__(self) -> None:
        refuse(
            at_least(self, 1, "actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus")
            + at_least(self, 1, "rollout_num_gpus_per_engine")
            + above(self, 0, "start_timeout_s", "distributed_timeout_minutes", "gpu_memory_gb")
        )

    @property
    def num_trainer_ranks(self) -> int:
        """Over all nodes."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def num_rollout_gpus(self) -> int:
        """Of all rollout engines together."""
        if self.rollout_num_gpus is not None:
            return self.rollout_num_gpus
        return self.num_trainer_ranks if self.colocate else 1

    @property
    def num_engines(self) -> int:
        """Rollout engines; on a CPU as well."""
        return self.num_rollout_gpus // self.rollout_num_gpus_per_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which prompts."""

    prompt_data: Annotated[Path, "JSONL file of training prompts, one object per line."]
    input_key: Annotated[str, "Key of the prompt: a string, or a list of chat messages with --apply-chat-template."] = (
        "input"
    )
    label_key: Annotated[str | None, "Key of the reference answer."] = None
    metadata_key: Annotated[str | None, "Key of an object handed to rewards and filters as it is."] = None
    apply_chat_template: Annotated[bool, "Render chat messages with the tokenizer's template."] = False
    rollout_shuffle: Annotated[bool, "Shuffle the prompts anew in each epoch."] = False
    rollout_seed: Annotated[int, "Of the shuffle."] = 42
    rollout_max_prompt_len: Annotated[int | None, "Leave out prompts of more tokens; they are counted in the log."] = (
        None
    )

    def __post_init__(self) -> None:
        refuse(
            at_least(self, 1, "rollout_max_prompt_len")
            + at_least(self, 0, "rollout_seed")
            + must(self.input_key != "", "input-key must not be empty")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """What is generated, and how old it may be."""

    num_rollout: Annotated[int, "Training steps in the run (slime's name: one rollout batch each)."]
    rollout_batch_size: Annotated[int, "Prompts (groups) per training step."]
    n_samples_per_prompt: Annotated[int, "Samples per group."] = 1
    rollout_temperature: Annotated[float, "Above 0."] = 1.0
    rollout_top_p: Annotated[float, "1.0 is off."] = 1.0
    rollout_top_k: Annotated[int, "-1 is off."] = -1
    rollout_max_response_len: Annotated[int, "Most tokens of one answer."] = 1024
    rollout_stop: Annotated[tuple[str, ...], "Texts that end an answer."] = ()
    rollout_stop_token_ids: Annotated[tuple[int, ...], "Tokens that end an answer, besides the model's end token."] = ()
    sglang_server_concurrency: Annotated[int, "Samples in flight per rollout engine."] = 512
    update_weights_interval: Annotated[int, "Push weights to the engines after every so many training steps."] = 1
    max_staleness: Annotated[
        int | None,
        "No trained token is older than this many steps; default: --update-weights-interval. 0 trains synchronously.",
    ] = None
    stale_policy: Annotated[
        Literal["wait", "mask", "drop"],
        "When a group due now is unfinished: wait for it, or mask its over-age tokens out of the loss when it"
        " comes, or drop it and return its prompt.",
    ] = "wait"
    weight_update_mode: Annotated[
        Literal["in_place", "retract", "abort"],
        "What an update does to samples in flight: they keep their KV cache, or recompute it, or are aborted "
        "and resubmitted with what they had written.",
    ] = "in_place"
    dynamic_sampling_filter_path: Annotated[
        str | None, "Function that decides which groups are kept: dotted.path, module:function or file.py:function."
    ] = None
    over_sampling_batch_size: Annotated[
        int | None,
        "Most groups in flight for every --rollout-batch-size wanted; default: as many as the filter's "
        "running acceptance rate asks for, with --stale-policy drop just those wanted.",
    ] = None
    async_buffer_size: Annotated[
        int | None,
        "Most groups that wait to be trained, those in flight that will join them included; default: what "
        "--max-staleness allows.",
    ] = None
    buffer_filter_path: Annotated[
        str | None,
        "Function that picks the groups of a batch among those that wait, named likewise; default: oldest first.",
    ] = None
    partial_rollout: Annotated[
        bool, "A group that grew too old before it was done keeps its tokens and goes on under newer weights."
    ] = False
    mask_offpolicy_in_partial_rollout: Annotated[
        bool, "Of such a group, train only on what was written after it went on."
    ] = False
    follow_kv_cache: Annotated[bool, "Start no more samples than the engines' KV caches can hold."] = False
    custom_rm_path: Annotated[str | None, "Reward function, named likewise. Goes before --rm-type."] = None
    rm_type: Annotated[
        Literal["number", "exact"] | None,
        "Built-in reward: number compares the last number in the answer with the label, exact the stripped texts.",
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
            + must("" not in self.rollout_stop, "rollout-stop must not contain an empty text")
        )

    @property
    def staleness(self) -> int:
        """Most steps between generating a token and training on it."""
        return self.update_weights_interval if self.max_staleness is None else self.max_staleness

    @property
    def samples_per_step(self) -> int:
        """Samples of one training step."""
        return self.rollout_batch_size * self.n_samples_per_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureConfig:
    """How much may go wrong."""

    max_sample_retries: Annotated[
        int, "Attempts after the first for a sample whose engine failed; the tokens that are there are kept."
    ] = 3
    max_engine_restarts: Annotated[
        int | None,
        "Engines that end are started again, so many times in all, and tried again if they do not start; the "
        "next one that ends, ends the run. Default: 3, with --colocate 0.",
    ] = None
    max_failed_groups: Annotated[int, "Failed groups in a row that end the run."] = 16
    max_filtered_groups: Annotated[int, "Filtered groups in a row that end the run."] = 1024
    request_timeout_s: Annotated[float, "Without a token, until a request counts as timed out, in seconds."] = 300.0
    control_timeout_s: Annotated[float, "For one pause, update or continue of an engine, in seconds."] = 120.0
    reward_timeout_s: Annotated[float, "For one call of the reward function, in seconds."] = 60.0
    train_timeout_s: Annotated[float, "For one training step or save, in seconds."] = 3600.0
    watchdog_timeout_s: Annotated[
        float, "Without any token, step or update, until the run is declared stuck, in seconds."
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
    """How the weights change."""

    advantage_estimator: Annotated[
        Literal["grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"],
        "Where advantages come from, and how the ratio is clipped; docs/algorithms.md has the equations.",
    ] = "grpo"
    custom_advantage_function_path: Annotated[
        str | None,
        "Function in the place of the estimator's advantages, named like a reward: docs/plugins.md has its shape.",
    ] = None
    custom_loss_function_path: Annotated[
        str | None, "Function in the place of the clipped policy loss, named likewise."
    ] = None
    disable_grpo_std_normalization: Annotated[
        bool, "grpo, gspo, cispo: do not divide a group's advantages by their standard deviation (Dr. GRPO)."
    ] = False
    normalize_advantages: Annotated[
        bool | None,
        "Advantages less their mean over all tokens of the step, over their standard deviation. Default: on "
        "for reinforce_plus_plus and reinforce_plus_plus_baseline, which are nothing without it.",
    ] = None
    gamma: Annotated[float, "Discount of rewards per token, for reinforce_plus_plus and ppo."] = 1.0
    lambd: Annotated[
        float, "ppo: how far generalised advantage estimates trust rewards rather than the critic's values."
    ] = 1.0
    value_clip: Annotated[float, "ppo: how far one step may move a value of the critic."] = 0.2
    critic_load: Annotated[
        Path | None, "ppo: folder of the critic's first weights, in Hugging Face format; default: --hf-checkpoint."
    ] = None
    critic_lr: Annotated[float | None, "ppo: learning rate of the critic; default: --lr."] = None
    critic_lr_warmup_iters: Annotated[
        int, "ppo: training steps over which the critic's learning rate rises linearly from 0."
    ] = 0
    num_critic_only_steps: Annotated[int, "ppo: training steps in the beginning that train the critic alone."] = 0
    eps_clip: Annotated[float, "Lower clip range of the probability ratio."] = 0.2
    eps_clip_high: Annotated[float | None, "Upper clip range; default: --eps-clip."] = None
    eps_clip_c: Annotated[
        float | None,
        "Dual clip: where the advantage is negative, the ratio counts as at most this; above 1. Default: off.",
    ] = None
    kl_coef: Annotated[
        float, "reinforce_plus_plus, its baseline and ppo: what a nat of KL from the reference model costs, in reward."
    ] = 0.0
    use_kl_loss: Annotated[
        bool, "Measure the KL from the reference model in the loss, and add it with --kl-loss-coef."
    ] = False
    kl_loss_coef: Annotated[float, "Weight of the KL in the loss."] = 0.0
    kl_loss_type: Annotated[
        Literal["k1", "k2", "k3", "low_var_kl"],
        "Estimator of the KL, in the loss and in the reward. k1 alone does not pull as a loss; k3 is GRPO's.",
    ] = "k1"
    use_unbiased_kl: Annotated[bool, "Weigh the KL in the loss by the probability ratio, as DeepSeek-V3.2 does."] = (
        False
    )
    ref_load: Annotated[
        Path | None,
        "Folder of the reference model, in Hugging Face format or a checkpoint; default: --hf-checkpoint. "
        "Used for a KL, and for the policy's first weights if --load has none.",
    ] = None
    entropy_coef: Annotated[float, "Weight of the policy's entropy, which is added to what is maximised."] = 0.0
    use_tis: Annotated[
        bool,
        "Weigh the loss of each token by trainer's over engine's probability at the start of the step. The "
        "ratio that is clipped is then against the trainer's.",
    ] = False
    tis_mode: Annotated[
        Literal["truncate", "mask", "whole"],
        "Weights outside --tis-clip-low to --tis-clip are set to the bound (TIS), or to 0 (masked importance "
        "sampling, IcePop), or stay (decoupled PPO).",
    ] = "truncate"
    tis_level: Annotated[
        Literal["token", "sequence", "geometric"],
        "The weight is that of the token, of the whole answer, or the geometric mean over the answer.",
    ] = "token"
    tis_clip: Annotated[float, "Upper bound of the weights."] = 2.0
    tis_clip_low: Annotated[float, "Lower bound of the weights."] = 0.0
    use_opsm: Annotated[
        bool,
        "Leave out answers of negative advantage that the policy has moved away from (off-policy sequence masking).",
    ] = False
    opsm_delta: Annotated[
        float, "How far, in nats per token: mean log-prob under the engine minus that under the policy."
    ] = 1e-4
    calculate_per_token_loss: Annotated[
        bool, "Average over all tokens; the default averages over each sample first."
    ] = False
    use_rollout_logprobs: Annotated[
        bool | None,
        "Ratio against the log-probs of the engine that sampled, which corrects for stale data; off: against "
        "the trainer's own at the start of the step. Default: on unless --max-staleness is 0.",
    ] = None
    global_batch_size: Annotated[int | None, "Samples per optimiser update; default: the whole step."] = None
    num_steps_per_rollout: Annotated[
        int | None, "Optimiser updates per training step; default: 1, or what --global-batch-size gives."
    ] = None
    use_dynamic_batch_size: Annotated[
        bool | None,
        "Fill microbatches with samples up to --max-tokens-per-gpu. Default: on unless --micro-batch-size is given.",
    ] = None
    max_tokens_per_gpu: Annotated[
        int, "Tokens of one packed microbatch; a longer sample gets a microbatch of its own."
    ] = 8192
    micro_batch_size: Annotated[
        int | None,
        "Samples of one microbatch, packed whatever their lengths; 1 if --no-use-dynamic-batch-size is all there is.",
    ] = None
    balance_data: Annotated[
        bool, "Give every trainer rank samples of about as many tokens; off: every n-th sample."
    ] = False
    lr: Annotated[float, "Learning rate."] = 1e-6
    lr_warmup_iters: Annotated[int, "Training steps over which the learning rate rises linearly from 0."] = 0
    weight_decay: Annotated[float, "Of AdamW."] = 0.01
    adam_beta1: Annotated[float, "Of AdamW."] = 0.9
    adam_beta2: Annotated[float, "Of AdamW."] = 0.98
    adam_eps: Annotated[float, "Of AdamW."] = 1e-8
    clip_grad: Annotated[float, "Largest gradient norm; 0 is off."] = 1.0
    update_weight_transport: Annotated[
        Literal["nccl", "disk"],
        "How weights reach the engines: broadcast (on CPUs by gloo), or as files where no network group reaches.",
    ] = "nccl"
    update_weight_disk_dir: Annotated[
        Path | None,
        "disk: a folder that trainer, engines and the driver share; a new one in it has two sets of weights, at most.",
    ] = None
    update_weight_buffer_size: Annotated[
        int, "Bytes of one bucket of a weight update; each engine keeps two buffers of this size."
    ] = 512 * 1024**2
    update_weights_beside_training: Annotated[
        bool | None,
        "Copy the weights on the trainer's first GPU, so that training goes on while they are sent. Default: "
        "where the copy takes at most a tenth of that GPU's memory and all else fits beside it.",
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
    """What is kept of a run, so that another can go on with it."""

    save: Annotated[Path | None, "Folder for checkpoints; default: none are written."] = None
    save_interval: Annotated[
        int | None, "Write one after every so many training steps; one after the last step is written in any case."
    ] = None
    async_save: Annotated[
        bool, "Train on while a checkpoint is written; training waits only for its copy in host memory."
    ] = True
    save_optim: Annotated[
        bool, "Keep the optimizer's state; without it a resumed run starts with a fresh optimizer."
    ] = True
    load: Annotated[
        Path | None,
        "Go on from the newest checkpoint in this folder. If there is none, start from the weights of "
        "--ref-load, and without it from those of --hf-checkpoint.",
    ] = None
    ckpt_step: Annotated[int | None, "Go on from the checkpoint after so many steps instead of the newest."] = None
    load_optim: Annotated[bool, "Load the optimizer's state."] = True

    def __post_init__(self) -> None:
        refuse(at_least(self, 1, "save_interval", "ckpt_step"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """How progress is measured on held-out prompts."""

    eval_interval: Annotated[
        int | None, "Evaluate after every so many training steps, and once before the first; default: never."
    ] = None
    eval_prompt_data: Annotated[tuple[str, ...], "NAME PATH pairs of JSONL files."] = ()
    skip_eval_before_train: Annotated[bool, "Leave out the pass before the first step."] = False
    n_samples_per_eval_prompt: Annotated[int, "Answers per held-out prompt."] = 1
    eval_temperature: Annotated[float | None, "Default: --rollout-temperature. 0 is greedy."] = None
    eval_max_response_len: Annotated[int | None, "Default: --rollout-max-response-len."] = None

    def __post_init__(self) -> None:
        names = self.eval_prompt_data[::2]
        paired = len(self.eval_prompt_data) % 2 == 0
        refuse(
            at_least(self, 1, "eval_interval", "n_samples_per_eval_prompt", "eval_max_response_len")
            + at_least(self, 0, "eval_temperature")
            + must(paired, f"eval-prompt-data must be NAME PATH pairs, got {len(self.eval_prompt_data)} words")
            + must(len(set(names)) == len(names), f"eval-prompt-data has a name twice: {', '.join(names)}")
        )

    @property
    def data_sets(self) -> tuple[tuple[str, Path], ...]:
        """Name and file of each."""
        words = self.eval_prompt_data
        return tuple((name, Path(path)) for name, path in zip(words[::2], words[1::2], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """What a run leaves behind."""

    run_dir: Annotated[Path | None, "Default: runs/NAME-DATE-TIME, NAME being that of the TOML file."] = None
    use_tensorboard: Annotated[bool, "Write TensorBoard events."] = True
    timeline: Annotated[bool, "Write timeline.json, which Perfetto opens."] = True
    progress: Annotated[
        Literal["auto", "live", "lines"],
        "live redraws a table, lines prints one line per step; auto is live on a terminal.",
    ] = "auto"
    dry_run: Annotated[
        bool,
        "Start nothing: check every setting, show what the run takes of each GPU's memory, and refuse what "
        "cannot fit. Needs no GPU, and of the model config.json alone.",
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The whole run.  Only nests; a function takes the area or the value it needs, never this."""

    name: str
    """Of the TOML file, without its ending."""
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
    """Server flags by name without ``--sglang-``; True is a bare flag."""
    router: dict[str, str | bool] = field(default_factory=dict)
    """Router flags by name without ``--router-``."""
