"""What a run is: one frozen dataclass per area.  A field's name is its flag and its TOML key, with ``-`` for ``_``.

The text under a field is its help text.  slime's names and meanings hold wherever the feature exists.  An area checks
the range of each of its fields; what involves two fields or the file system is in ``problems.py``, and defaults that
come from other areas are in ``derived.py``.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from asyncrl.config.parallel import ParallelConfig
from asyncrl.config.ranges import above, at_least, must, refuse
from asyncrl.config.shape import ShapeConfig

TransformerImpl = Literal["auto", "local", "transformer_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model."""

    hf_checkpoint: Path
    """Folder in Hugging Face format: config.json, tokenizer, safetensors.  In fp8 in blocks, engines serve it so, and
    the trainer begins with the numbers that it stands for, unless --load or --ref-load has others."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; auto is bfloat16 on GPUs and float32 on a CPU, where bfloat16 is 4-6 times slower."""
    transformer_impl: TransformerImpl = "auto"
    """The trainer's layers: Megatron's own, or TransformerEngine's, which must be installed, need GPUs, and fuse norms
    and activations with what is beside them.  auto takes those where they can be had, in bfloat16."""
    seed: int = 1234
    """Of the trainer and of the draws of the rollout engines."""

    def __post_init__(self) -> None:
        refuse(must(0 <= self.seed < 2**31, f"seed must be at least 0 and below 2**31, got {self.seed}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Where things run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs where Ray offers them."""
    actor_num_nodes: int = 1
    """Nodes of the trainer."""
    actor_num_gpus_per_node: int = 1
    """Trainer ranks per node; on a CPU, processes."""
    rollout_num_gpus: int | None = None
    """GPUs of all rollout engines together; on a CPU, engines.  Default: 1, with --colocate the trainer's."""
    rollout_num_gpus_per_engine: int = 1
    """GPUs of one engine (its tensor parallel size)."""
    colocate: bool = False
    """Trainer and engines have the same GPUs, in turns: each gives its memory back while the other works.  Such a run
    is synchronous (--max-staleness 0)."""
    use_router: bool = True
    """Put sglang-router in front of the engines; without it requests go to the engines in turn."""
    start_timeout_s: float = 600.0
    """Until every process must be ready, in seconds."""
    distributed_timeout_minutes: float = 10.0
    """For one collective operation, in minutes."""
    gpu_memory_gb: float = 141.0
    """Of one GPU, in 10^9 bytes, for --dry-run.  The default is an H200's data sheet; its driver shows 6% more."""

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

    prompt_data: Path
    """JSONL file of training prompts, one object per line."""
    input_key: str = "input"
    """Key of the prompt: a string, or a list of chat messages with --apply-chat-template."""
    label_key: str | None = None
    """Key of the reference answer."""
    metadata_key: str | None = None
    """Key of an object handed to rewards and filters as it is."""
    apply_chat_template: bool = False
    """Render chat messages with the tokenizer's template."""
    rollout_shuffle: bool = False
    """Shuffle the prompts anew in each epoch."""
    rollout_seed: int = 42
    """Of the shuffle."""
    rollout_max_prompt_len: int | None = None
    """Leave out prompts of more tokens; they are counted in the log."""

    def __post_init__(self) -> None:
        refuse(
            at_least(self, 1, "rollout_max_prompt_len")
            + at_least(self, 0, "rollout_seed")
            + must(self.input_key != "", "input-key must not be empty")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """What is generated, and how old it may be."""

    num_rollout: int
    """Training steps in the run (slime's name: one rollout batch each)."""
    rollout_batch_size: int
    """Prompts (groups) per training step."""
    n_samples_per_prompt: int = 1
    """Samples per group."""
    rollout_temperature: float = 1.0
    """Above 0."""
    rollout_top_p: float = 1.0
    """1.0 is off."""
    rollout_top_k: int = -1
    """-1 is off."""
    rollout_max_response_len: int = 1024
    """Most tokens of one answer."""
    rollout_stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    rollout_stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, besides the model's end token."""
    sglang_server_concurrency: int = 512
    """Samples in flight per rollout engine."""
    update_weights_interval: int = 1
    """Push weights to the engines after every so many training steps."""
    max_staleness: int | None = None
    """No trained token is older than this many steps; default: --update-weights-interval.  0 trains synchronously."""
    stale_policy: Literal["wait", "mask", "drop"] = "wait"
    """When a group due now is unfinished: wait for it, or mask its over-age tokens out of the loss when it comes, or
    drop it and return its prompt."""
    weight_update_mode: Literal["in_place", "retract", "abort"] = "in_place"
    """What an update does to samples in flight: they keep their KV cache, or recompute it, or are aborted and
    resubmitted with what they had written."""
    dynamic_sampling_filter_path: str | None = None
    """Function that decides which groups are kept: dotted.path, module:function or file.py:function."""
    over_sampling_batch_size: int | None = None
    """Most groups in flight for every --rollout-batch-size wanted; default: as many as the filter's running acceptance
    rate asks for, with --stale-policy drop just those wanted."""
    async_buffer_size: int | None = None
    """Most groups that wait to be trained, those in flight that will join them included; default: what --max-staleness
    allows."""
    buffer_filter_path: str | None = None
    """Function that picks the groups of a batch among those that wait, named likewise; default: oldest first."""
    partial_rollout: bool = False
    """A group that grew too old before it was done keeps its tokens and goes on under newer weights."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Of such a group, train only on what was written after it went on."""
    follow_kv_cache: bool = False
    """Start no more samples than the engines' KV caches can hold."""
    custom_rm_path: str | None = None
    """Reward function, named likewise.  Goes before --rm-type."""
    rm_type: Literal["number", "exact"] | None = None
    """Built-in reward: number compares the last number in the answer with the label, exact the stripped texts."""

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

    max_sample_retries: int = 3
    """Attempts after the first for a sample whose engine failed; the tokens that are there are kept."""
    max_engine_restarts: int | None = None
    """Engines that end are started again, so many times in all, and tried again if they do not start; the next one that
    ends, ends the run.  Default: 3, with --colocate 0."""
    max_failed_groups: int = 16
    """Failed groups in a row that end the run."""
    max_filtered_groups: int = 1024
    """Filtered groups in a row that end the run."""
    request_timeout_s: float = 300.0
    """Without a token, until a request counts as timed out, in seconds."""
    control_timeout_s: float = 120.0
    """For one pause, update or continue of an engine, in seconds."""
    reward_timeout_s: float = 60.0
    """For one call of the reward function, in seconds."""
    train_timeout_s: float = 3600.0
    """For one training step or save, in seconds."""
    watchdog_timeout_s: float = 1800.0
    """Without any token, step or update, until the run is declared stuck, in seconds."""

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

    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
    ] = "grpo"
    """Where advantages come from, and how the ratio is clipped; docs/algorithms.md has the equations."""
    custom_advantage_function_path: str | None = None
    """Function in the place of the estimator's advantages, named like a reward: docs/plugins.md has its shape."""
    custom_loss_function_path: str | None = None
    """Function in the place of the clipped policy loss, named likewise."""
    disable_grpo_std_normalization: bool = False
    """grpo, gspo, cispo: do not divide a group's advantages by their standard deviation (Dr. GRPO)."""
    normalize_advantages: bool | None = None
    """Advantages less their mean over all tokens of the step, over their standard deviation.  Default: on for
    reinforce_plus_plus and reinforce_plus_plus_baseline, which are nothing without it."""
    gamma: float = 1.0
    """Discount of rewards per token, for reinforce_plus_plus and ppo."""
    lambd: float = 1.0
    """ppo: how far generalised advantage estimates trust rewards rather than the critic's values."""
    value_clip: float = 0.2
    """ppo: how far one step may move a value of the critic."""
    critic_load: Path | None = None
    """ppo: folder of the critic's first weights, in Hugging Face format; default: --hf-checkpoint."""
    critic_lr: float | None = None
    """ppo: learning rate of the critic; default: --lr."""
    critic_lr_warmup_iters: int = 0
    """ppo: training steps over which the critic's learning rate rises linearly from 0."""
    num_critic_only_steps: int = 0
    """ppo: training steps in the beginning that train the critic alone."""
    eps_clip: float = 0.2
    """Lower clip range of the probability ratio."""
    eps_clip_high: float | None = None
    """Upper clip range; default: --eps-clip."""
    eps_clip_c: float | None = None
    """Dual clip: where the advantage is negative, the ratio counts as at most this; above 1.  Default: off."""
    kl_coef: float = 0.0
    """reinforce_plus_plus, its baseline and ppo: what a nat of KL from the reference model costs, in reward."""
    use_kl_loss: bool = False
    """Measure the KL from the reference model in the loss, and add it with --kl-loss-coef."""
    kl_loss_coef: float = 0.0
    """Weight of the KL in the loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """Estimator of the KL, in the loss and in the reward.  k1 alone does not pull as a loss; k3 is GRPO's."""
    use_unbiased_kl: bool = False
    """Weigh the KL in the loss by the probability ratio, as DeepSeek-V3.2 does."""
    ref_load: Path | None = None
    """Folder of the reference model, in Hugging Face format or a checkpoint; default: --hf-checkpoint.  Used for a KL,
    and for the policy's first weights if --load has none."""
    entropy_coef: float = 0.0
    """Weight of the policy's entropy, which is added to what is maximised."""
    use_tis: bool = False
    """Weigh the loss of each token by trainer's over engine's probability at the start of the step.  The ratio that is
    clipped is then against the trainer's."""
    tis_mode: Literal["truncate", "mask", "whole"] = "truncate"
    """Weights outside --tis-clip-low to --tis-clip are set to the bound (TIS), or to 0 (masked importance sampling,
    IcePop), or stay (decoupled PPO)."""
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """The weight is that of the token, of the whole answer, or the geometric mean over the answer."""
    tis_clip: float = 2.0
    """Upper bound of the weights."""
    tis_clip_low: float = 0.0
    """Lower bound of the weights."""
    use_opsm: bool = False
    """Leave out answers of negative advantage that the policy has moved away from (off-policy sequence masking)."""
    opsm_delta: float = 1e-4
    """How far, in nats per token: mean log-prob under the engine minus that under the policy."""
    calculate_per_token_loss: bool = False
    """Average over all tokens; the default averages over each sample first."""
    use_rollout_logprobs: bool | None = None
    """Ratio against the log-probs of the engine that sampled, which corrects for stale data; off: against the trainer's
    own at the start of the step.  Default: on unless --max-staleness is 0."""
    global_batch_size: int | None = None
    """Samples per optimiser update; default: the whole step."""
    num_steps_per_rollout: int | None = None
    """Optimiser updates per training step; default: 1, or what --global-batch-size gives."""
    use_dynamic_batch_size: bool | None = None
    """Fill microbatches with samples up to --max-tokens-per-gpu.  Default: on unless --micro-batch-size is given."""
    max_tokens_per_gpu: int = 8192
    """Tokens of one packed microbatch; a longer sample gets a microbatch of its own."""
    micro_batch_size: int | None = None
    """Samples of one microbatch, packed whatever their lengths; 1 if --no-use-dynamic-batch-size is all there is."""
    balance_data: bool = False
    """Give every trainer rank samples of about as many tokens; off: every n-th sample."""
    lr: float = 1e-6
    """Learning rate."""
    lr_warmup_iters: int = 0
    """Training steps over which the learning rate rises linearly from 0."""
    weight_decay: float = 0.01
    """Of AdamW."""
    adam_beta1: float = 0.9
    """Of AdamW."""
    adam_beta2: float = 0.98
    """Of AdamW."""
    adam_eps: float = 1e-8
    """Of AdamW."""
    clip_grad: float = 1.0
    """Largest gradient norm; 0 is off."""
    update_weight_transport: Literal["nccl", "disk"] = "nccl"
    """How weights reach the engines: broadcast (on CPUs by gloo), or as files where no network group reaches."""
    update_weight_disk_dir: Path | None = None
    """disk: a folder that trainer, engines and the driver share; a new one in it has two sets of weights, at most."""
    update_weight_buffer_size: int = 512 * 1024**2
    """Bytes of one bucket of a weight update; each engine keeps two buffers of this size."""
    update_weights_beside_training: bool | None = None
    """Copy the weights on the trainer's first GPU, so that training goes on while they are sent.  Default: where the
    copy takes at most a tenth of that GPU's memory and all else fits beside it."""
    check_weight_updates: bool = False
    """Compare every update, and the engines' weights after it, with what the trainer sent."""

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

    save: Path | None = None
    """Folder for checkpoints; default: none are written."""
    save_interval: int | None = None
    """Write one after every so many training steps; one after the last step is written in any case."""
    async_save: bool = True
    """Train on while a checkpoint is written; training waits only for its copy in host memory."""
    save_optim: bool = True
    """Keep the optimizer's state; without it a resumed run starts with a fresh optimizer."""
    load: Path | None = None
    """Go on from the newest checkpoint in this folder.  If there is none, start from the weights of --ref-load, and
    without it from those of --hf-checkpoint."""
    ckpt_step: int | None = None
    """Go on from the checkpoint after so many steps instead of the newest."""
    load_optim: bool = True
    """Load the optimizer's state."""

    def __post_init__(self) -> None:
        refuse(at_least(self, 1, "save_interval", "ckpt_step"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """How progress is measured on held-out prompts."""

    eval_interval: int | None = None
    """Evaluate after every so many training steps, and once before the first; default: never."""
    eval_prompt_data: tuple[str, ...] = ()
    """NAME PATH pairs of JSONL files."""
    skip_eval_before_train: bool = False
    """Leave out the pass before the first step."""
    n_samples_per_eval_prompt: int = 1
    """Answers per held-out prompt."""
    eval_temperature: float | None = None
    """Default: --rollout-temperature.  0 is greedy."""
    eval_max_response_len: int | None = None
    """Default: --rollout-max-response-len."""

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

    run_dir: Path | None = None
    """Default: runs/NAME-DATE-TIME, NAME being that of the TOML file."""
    use_tensorboard: bool = True
    """Write TensorBoard events."""
    timeline: bool = True
    """Write timeline.json, which Perfetto opens."""
    progress: Literal["auto", "live", "lines"] = "auto"
    """live redraws a table, lines prints one line per step; auto is live on a terminal."""
    dry_run: bool = False
    """Start nothing: check every setting, show what the run takes of each GPU's memory, and refuse what cannot fit.
    Needs no GPU, and of the model config.json alone."""


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
