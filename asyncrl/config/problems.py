"""Contradictions between settings, and files that are not there.  Ranges of single fields are in ``areas.py``."""

from pathlib import Path

from asyncrl.config.areas import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    EvalConfig,
    FailureConfig,
    ModelConfig,
    OutputConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from asyncrl.config.derived import has_critic, normalize_advantages, num_steps_per_rollout
from asyncrl.config.parallel import parallel_problems
from asyncrl.config.ranges import must


def missing_files(run: RunConfig, *, needs_weights: bool = True) -> list[str]:
    """One line for each file or folder that the run reads and that is not there; weights only if they are needed."""
    return [
        *_checkpoint(run.model, needs_weights=needs_weights),
        *_file("prompt-data", run.data.prompt_data),
        *(line for name, path in run.evaluation.data_sets for line in _file(f"eval-prompt-data {name}", path)),
        *_folders(run.train),
    ]


def contradictions(run: RunConfig) -> list[str]:
    """One line for each setting that does not go with another, or with what is in the run's own folders."""
    return [
        *_cluster(run.cluster),
        *_colocation(run),
        *_layers(run),
        *parallel_problems(run.parallel, run.cluster.num_trainer_ranks),
        *_reward(run.rollout, run.data),
        *_staleness(run.rollout),
        *_supply(run.rollout),
        *_batch(run.rollout, run.train),
        *_estimator(run.train),
        *_reference(run.train),
        *_transport(run.train),
        *_corrections(run.train),
        *_checkpoints(run.checkpoint),
        *_evaluation(run.evaluation),
        *_deadlines(run.failures),
        *_output(run.output, run.checkpoint),
    ]


def _checkpoint(model: ModelConfig, *, needs_weights: bool) -> list[str]:
    folder = model.hf_checkpoint
    if not folder.is_dir():
        return [f"hf-checkpoint {folder}: no such folder; give a local folder in Hugging Face format"]
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    missing += [] if not needs_weights or any(folder.glob("*.safetensors")) else ["*.safetensors"]
    return must(not missing, f"hf-checkpoint {folder} has no {', no '.join(missing)}")


def _cluster(cluster: ClusterConfig) -> list[str]:
    total, each = cluster.num_rollout_gpus, cluster.rollout_num_gpus_per_engine
    if cluster.colocate:
        return must(
            total % each == 0,
            f"colocate: the trainer's {total} GPUs (actor-num-nodes x actor-num-gpus-per-node) are not a multiple of "
            f"rollout-num-gpus-per-engine {each}",
        )
    return must(total % each == 0, f"rollout-num-gpus {total} is not a multiple of rollout-num-gpus-per-engine {each}")


def _layers(run: RunConfig) -> list[str]:
    """What TransformerEngine's layers cannot do."""
    if run.model.transformer_impl != "transformer_engine":
        return []
    return must(run.cluster.device != "cpu", "transformer-impl transformer_engine: it needs GPUs; leave it out") + must(
        "layernorm" not in run.parallel.recompute_modules,
        "recompute-modules layernorm with transformer-impl transformer_engine, whose layers have their norms within; "
        "leave it out",
    )


def _colocation(run: RunConfig) -> list[str]:
    """What cannot be while trainer and engines have the same GPUs in turns."""
    cluster, staleness = run.cluster, run.rollout.staleness
    if not cluster.colocate:
        return []
    trainer, engines, restarts = cluster.num_trainer_ranks, cluster.num_rollout_gpus, run.failures.max_engine_restarts
    default = " (the default)" if run.rollout.max_staleness is None else ""
    return (
        must(
            engines == trainer,
            f"colocate: the engines have the trainer's {trainer} GPUs, rollout-num-gpus says {engines}; leave it out",
        )
        + must(
            staleness == 0,
            f"colocate with max-staleness {staleness}{default}: engines have no memory while the trainer works, so "
            "nothing is generated beside training; give max-staleness 0",
        )
        + must(
            not restarts,
            f"colocate with max-engine-restarts {restarts}: an engine cannot start while the trainer has its GPUs; "
            "leave it out",
        )
        + must(
            not run.train.update_weights_beside_training,
            "colocate with update-weights-beside-training: engines take weights only when the trainer stands still; "
            "leave it out",
        )
        + must(
            not run.train.check_weight_updates,
            "colocate with check-weight-updates, which checks broadcasts: here weights stay on their GPU; leave it out",
        )
        + must(
            run.train.update_weight_transport == "nccl",
            "colocate with update-weight-transport disk: weights stay on their GPU; leave it out",
        )
    )


def _folders(train: TrainConfig) -> list[str]:
    """Of the critic's and the reference model's weights."""
    critic, reference = train.critic_load, train.ref_load
    lines = must(
        critic is None or not has_critic(train) or (critic / "config.json").is_file(),
        f"critic-load {critic} is no folder with a config.json",
    )
    return lines + must(reference is None or reference.is_dir(), f"ref-load {reference}: no such folder")


def _reward(rollout: RolloutConfig, data: DataConfig) -> list[str]:
    if rollout.custom_rm_path is not None:
        return []
    if rollout.rm_type is None:
        return ["there is no reward: give rm-type or custom-rm-path"]
    return must(data.label_key is not None, f"rm-type {rollout.rm_type} compares with a label: give label-key")


def _staleness(rollout: RolloutConfig) -> list[str]:
    allowed, interval = rollout.staleness, rollout.update_weights_interval
    return must(
        allowed >= interval - 1,
        f"max-staleness {allowed} can never be met with update-weights-interval {interval}: the engines keep their "
        f"weights for {interval} steps, so the last of these trains on tokens {interval - 1} steps old; "
        f"give max-staleness {interval - 1} or more",
    )


def _supply(rollout: RolloutConfig) -> list[str]:
    batch, sizes = rollout.rollout_batch_size, {}
    sizes["over-sampling-batch-size"] = rollout.over_sampling_batch_size
    sizes["async-buffer-size"] = rollout.async_buffer_size
    lines = [
        f"{name} {size} must be at least rollout-batch-size {batch}"
        for name, size in sizes.items()
        if size is not None and size < batch
    ]
    return lines + must(
        rollout.partial_rollout or not rollout.mask_offpolicy_in_partial_rollout,
        "mask-offpolicy-in-partial-rollout without partial-rollout: there is nothing to mask",
    )


def _batch(rollout: RolloutConfig, train: TrainConfig) -> list[str]:
    groups, each, samples = rollout.rollout_batch_size, rollout.n_samples_per_prompt, rollout.samples_per_step
    made = f"rollout-batch-size {groups} x n-samples-per-prompt {each} = {samples} samples"
    lines = must(
        each >= 2
        or train.advantage_estimator in ("reinforce_plus_plus", "ppo")
        or train.custom_advantage_function_path is not None,
        f"advantage-estimator {train.advantage_estimator} compares answers to one prompt: n-samples-per-prompt must be "
        f"at least 2, got {each}",
    )
    lines += must(
        not (train.use_dynamic_batch_size and train.micro_batch_size),
        f"micro-batch-size {train.micro_batch_size} with use-dynamic-batch-size, which counts tokens; "
        "leave one of them out",
    )
    size, updates = train.global_batch_size, num_steps_per_rollout(train, rollout)
    if size is not None and train.num_steps_per_rollout is not None and size * updates != samples:
        used = f"global-batch-size {size} x num-steps-per-rollout {updates} = {size * updates}"
        return [*lines, f"{made}, but {used}; leave one of them out"]
    if size is not None and samples % size:
        return [*lines, f"{made}, which is not a multiple of global-batch-size {size}"]
    derived = "" if train.num_steps_per_rollout is not None else f" (from global-batch-size {size})"
    return lines + must(
        groups % updates == 0,
        f"num-steps-per-rollout {updates}{derived} does not divide rollout-batch-size {groups}: no group is split",
    )


def _estimator(train: TrainConfig) -> list[str]:
    name = train.advantage_estimator
    return (
        must(
            normalize_advantages(train) or not name.startswith("reinforce_plus_plus"),
            f"advantage-estimator {name} needs normalize-advantages: its baseline is the mean over the step",
        )
        + must(
            train.eps_clip_c is None or name != "cispo",
            "eps-clip-c with advantage-estimator cispo, which has no dual clip: its ratio is bounded as it is",
        )
        + must(
            train.gamma == 1.0 or name in ("reinforce_plus_plus", "ppo"),
            f"gamma {train.gamma:g} with advantage-estimator {name}, which does not discount",
        )
        + _critic(train)
        + _custom(train)
    )


def _custom(train: TrainConfig) -> list[str]:
    lines = must(
        train.custom_advantage_function_path is None or not has_critic(train),
        "custom-advantage-function-path with advantage-estimator ppo, whose critic learns returns of its own: give "
        "another estimator",
    )
    clips = {
        "eps-clip": train.eps_clip != 0.2,
        "eps-clip-high": train.eps_clip_high is not None,
        "eps-clip-c": train.eps_clip_c is not None,
    }
    names = ", ".join(name for name, is_given in clips.items() if is_given)
    return lines + must(
        train.custom_loss_function_path is None or not names,
        f"{names} with custom-loss-function-path, which clips as it likes: give them as its arguments, "
        "file.py:name(0.2)",
    )


def _critic(train: TrainConfig) -> list[str]:
    if has_critic(train):
        return []
    given = {
        "lambd": train.lambd != 1.0,
        "value-clip": train.value_clip != 0.2,
        "critic-lr-warmup-iters": train.critic_lr_warmup_iters > 0,
        "critic-load": train.critic_load is not None,
        "critic-lr": train.critic_lr is not None,
        "num-critic-only-steps": train.num_critic_only_steps > 0,
    }
    names = ", ".join(name for name, is_given in given.items() if is_given)
    return must(
        not names, f"{names} with advantage-estimator {train.advantage_estimator}, which has no critic; give ppo"
    )


def _reference(train: TrainConfig) -> list[str]:
    lines = must(
        train.kl_coef == 0
        or train.advantage_estimator not in ("grpo", "gspo", "cispo")
        or train.custom_advantage_function_path is not None,
        f"kl-coef {train.kl_coef:g} with advantage-estimator {train.advantage_estimator}, which has one reward per "
        "answer: give use-kl-loss and kl-loss-coef",
    )
    lines += must(
        train.kl_coef == 0 or train.kl_loss_coef == 0,
        f"kl-coef {train.kl_coef:g} and kl-loss-coef {train.kl_loss_coef:g} charge the same KL twice; give one of them",
    )
    for name, given in {"kl-loss-coef": train.kl_loss_coef > 0, "use-unbiased-kl": train.use_unbiased_kl}.items():
        lines += must(train.use_kl_loss or not given, f"{name} without use-kl-loss: there is no KL in the loss")
    return lines


def _transport(train: TrainConfig) -> list[str]:
    if train.update_weight_transport != "disk":
        return must(
            train.update_weight_disk_dir is None,
            f"update-weight-disk-dir {train.update_weight_disk_dir} with update-weight-transport nccl, which writes "
            "nothing: give disk",
        )
    given = {
        "update-weights-beside-training": train.update_weights_beside_training,
        "check-weight-updates": train.check_weight_updates,
    }
    names = ", ".join(name for name, is_given in given.items() if is_given)
    return must(
        train.update_weight_disk_dir is not None,
        "update-weight-transport disk without update-weight-disk-dir: trainer and engines share no folder",
    ) + must(not names, f"{names} with update-weight-transport disk, where there is no copy on a GPU and no checksum")


def _corrections(train: TrainConfig) -> list[str]:
    tis = {
        "tis-mode": train.tis_mode != "truncate",
        "tis-level": train.tis_level != "token",
        "tis-clip": train.tis_clip != 2.0,
        "tis-clip-low": train.tis_clip_low != 0.0,
    }
    given = ", ".join(name for name, is_given in tis.items() if is_given)
    return (
        must(train.use_tis or not given, f"{given} without use-tis: nothing is weighed")
        + must(train.use_opsm or train.opsm_delta == 1e-4, "opsm-delta without use-opsm: no answer is left out")
        + must(
            not (train.use_tis and train.use_rollout_logprobs),
            "use-tis with use-rollout-logprobs: the ratio corrects for the engine already; leave one of them out",
        )
        + must(
            train.tis_clip_low <= train.tis_clip,
            f"tis-clip-low {train.tis_clip_low:g} is above tis-clip {train.tis_clip:g}",
        )
    )


def _checkpoints(checkpoint: CheckpointConfig) -> list[str]:
    lines = [
        f"{name} {path} is not a folder"
        for name, path in {"save": checkpoint.save, "load": checkpoint.load}.items()
        if path is not None and path.exists() and not path.is_dir()
    ]
    lines += must(
        checkpoint.save_interval is None or checkpoint.save is not None,
        f"save-interval {checkpoint.save_interval} without save: there is no folder for checkpoints",
    )
    return lines + must(
        checkpoint.ckpt_step is None or checkpoint.load is not None,
        f"ckpt-step {checkpoint.ckpt_step} without load: there is no folder to load from",
    )


def _evaluation(evaluation: EvalConfig) -> list[str]:
    interval, data_sets = evaluation.eval_interval, evaluation.data_sets
    lines = must(
        interval is None or bool(data_sets),
        f"eval-interval {interval} without eval-prompt-data: nothing to evaluate on",
    )
    return lines


def _deadlines(failures: FailureConfig) -> list[str]:
    """The watchdog must be the last to give up: it names less than those before it do."""
    request, control, attempts = failures.request_timeout_s, failures.control_timeout_s, failures.max_sample_retries + 1
    longest = max(request * attempts + 10 * failures.max_sample_retries, failures.reward_timeout_s)
    return must(
        request > control,
        f"request-timeout-s {request:g} must be above control-timeout-s {control:g}: requests are silent while weights "
        f"are updated",
    ) + must(
        failures.watchdog_timeout_s > longest,
        f"watchdog-timeout-s {failures.watchdog_timeout_s:g} must be above {longest:g}, the longest that one "
        f"sample may take to fail (request-timeout-s x attempts and 10 s between them, or reward-timeout-s)",
    )


def _output(output: OutputConfig, checkpoint: CheckpointConfig) -> list[str]:
    """What a run left is taken where this one may go on with it, or where it reported no step."""
    path = output.run_dir
    if path is None or not path.exists():
        return []
    if not path.is_dir():
        return [f"run-dir {path} is not a folder"]
    if not (path / "versions.json").is_file():
        return must(not any(path.iterdir()), f"run-dir {path} exists and is not empty")
    rows = path / "metrics.jsonl"
    may_go_on = checkpoint.load is not None or not rows.is_file() or rows.stat().st_size == 0
    return must(may_go_on, f"run-dir {path} has the steps of another run; this one can go on there with load alone")


def _file(setting: str, path: Path) -> list[str]:
    if (at := path.name.find("@[")) > 0 and not path.is_file():
        return [
            f"{setting} {path}: parts of a file cannot be asked for; write {path.name[:at]} as short as it shall be"
        ]
    if path.suffix == ".parquet":
        return [f"{setting} {path}: only JSONL is read, one object per line; pandas and others write it"]
    return must(path.is_file(), f"{setting} {path}: {'is a folder' if path.is_dir() else 'no such file'}")
