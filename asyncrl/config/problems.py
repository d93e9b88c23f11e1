"""The checks for contradictions between settings and for missing files.

``config.areas`` checks the ranges of single fields.
"""

import json
from functools import partial
from pathlib import Path

from asyncrl.config.areas import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    EpisodeConfig,
    FailureConfig,
    HookConfig,
    ModelConfig,
    OutputConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from asyncrl.config.areas.data import sliced
from asyncrl.config.areas.output import tracker_problems
from asyncrl.config.areas.parallel import parallel_problems
from asyncrl.config.areas.ranges import must
from asyncrl.config.areas.rewards import BOXED, REMOTE, WITHOUT_LABEL, key_problem
from asyncrl.config.derived import has_critic, normalize_advantages, num_steps_per_rollout, trainer_restart_obstacle
from asyncrl.config.eval_sets import eval_problems, missing_eval_files
from asyncrl.config.learning_rate_problems import learning_rate_problems


def missing_files(run: RunConfig, *, needs_weights: bool = True) -> list[str]:
    """One line for each missing file or folder that the run reads; weights count only if ``needs_weights``."""
    files = () if run.hooks.source else run.data.prompt_data
    return [
        *_checkpoint(run.model, needs_weights=needs_weights),
        *(line for path in files for line in _file("prompt-data", path)),
        *missing_eval_files(run, _file),
        *_folders(run.train, needs_weights=needs_weights),
        *([] if run.checkpoint.load else missing_batches(run, 0)),
    ]


def missing_batches(run: RunConfig, first: int) -> list[str]:
    """One line if a batch to train on is missing, from step ``first`` on."""
    if run.debug.load_debug_rollout_data is None:
        return []
    steps = range(first, run.rollout.num_rollout)
    missing = next((step for step in steps if not run.debug.file_to_load(step).is_file()), None)
    if missing is None:
        return []
    fewer = f"; with num-rollout {missing} they suffice" if missing > first else ""
    return [f"load-debug-rollout-data: no file {run.debug.file_to_load(missing)} for step {missing}{fewer}"]


def contradictions(run: RunConfig) -> list[str]:
    """One line for each setting that contradicts another or the content of the run's folders."""
    return [
        *_cluster(run.cluster),
        *_colocation(run),
        *_trainer_restarts(run),
        *_layers(run),
        *must(
            run.hooks.source is None or not run.data.streaming_data,
            f"streaming-data with data-source-path {run.hooks.source}, which gives prompts; leave out streaming-data",
        ),
        *parallel_problems(run.parallel, run.cluster.num_trainer_ranks),
        *_reward(run.reward, run.data, set_by_episodes=run.episodes.has_episodes),
        *_staleness(run.rollout),
        *_supply(run.rollout),
        *_episodes(run.episodes, run.rollout, run.data),
        *_batch(run.rollout, run.train, run.hooks),
        *_estimator(run.train),
        *_critic_only(run.train.num_critic_only_steps, run.rollout.num_rollout),
        *learning_rate_problems(run.train, run.rollout),
        *_reference(run.train),
        *_transport(run.train),
        *_corrections(run.train),
        *_checkpoints(run.checkpoint),
        *eval_problems(run, partial(_reward, set_by_episodes=run.episodes.has_episodes)),
        *_deadlines(run.failures),
        *_without_trainer(run),
        *_output(run.output, run.checkpoint),
        *tracker_problems(run.trackers),
    ]


def _trainer_restarts(run: RunConfig) -> list[str]:
    """One line if restarts of the trainer are wanted where there can be none."""
    wanted, obstacle = run.failures.max_trainer_restarts, trainer_restart_obstacle(run)
    return must(not wanted or obstacle is None, f"max-trainer-restarts {wanted}: {obstacle}; leave it out")


def _without_trainer(run: RunConfig) -> list[str]:
    """One line if settings of a run without a trainer need one."""
    needs = {
        "save": run.checkpoint.save is not None,
        "load": run.checkpoint.load is not None,
        "check-fast-step": run.train.check_fast_step,
        "check-weight-updates": run.train.check_weight_updates,
    }
    given = [name for name, is_given in needs.items() if is_given]
    return must(
        not run.debug.debug_rollout_only or not given,
        f"debug-rollout-only with {', '.join(given)}: there is no trainer; leave out one or the other",
    )


def _checkpoint(model: ModelConfig, *, needs_weights: bool) -> list[str]:
    folder = model.hf_checkpoint
    if not folder.is_dir():
        return [f"hf-checkpoint {folder}: no such folder; give a local folder in Hugging Face format"]
    tokenizer = "tiktoken.model" if (folder / "tiktoken.model").is_file() else "tokenizer.json"
    missing = [name for name in ("config.json", tokenizer) if not (folder / name).is_file()]
    if needs_weights:
        missing += _lost_shards(folder) if any(folder.glob("*.safetensors")) else ["*.safetensors"]
    return must(not missing, f"hf-checkpoint {folder} has no {', no '.join(missing)}")


def _lost_shards(folder: Path) -> list[str]:
    """The first file of weights that the folder's index names and an interrupted download left out, if any."""
    try:
        files = json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"].values()
        lost = sorted({name for name in files if not (folder / name).is_file()})
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ):  # no index, or one that nothing can be said of
        return []
    more = f" ({len(lost)} files of its index are missing)" if len(lost) > 1 else ""
    return [f"{lost[0]}{more}"] if lost else []


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
    """One line for each setting that TransformerEngine's layers do not support."""
    if run.model.transformer_impl != "transformer_engine":
        return []
    return must(
        run.cluster.device != "cpu",
        "transformer-impl transformer_engine with device cpu: TransformerEngine needs GPUs; give local",
    ) + must(
        "layernorm" not in run.parallel.recompute_modules,
        "recompute-modules layernorm with transformer-impl transformer_engine, whose norms are fused into its layers; "
        "leave out layernorm",
    )


def _colocation(run: RunConfig) -> list[str]:
    """One line for each setting that is impossible while trainer and engines alternate on the same GPUs."""
    cluster, staleness = run.cluster, run.rollout.staleness
    if not cluster.colocate:
        return []
    restarts = run.failures.max_engine_restarts
    return (
        must(
            staleness == 0,
            f"colocate with max-staleness {staleness}: engines have no memory while the trainer works, so "
            "generation cannot overlap with training; leave out max-staleness",
        )
        + must(
            not restarts,
            f"colocate with max-engine-restarts {restarts}: an engine cannot start while the trainer has its GPUs; "
            "leave out max-engine-restarts",
        )
        + must(
            not run.train.update_weights_during_training,
            "colocate with update-weights-during-training: engines take weights only while the trainer is paused; "
            "leave out update-weights-during-training",
        )
        + must(
            not run.train.check_weight_updates,
            "colocate with check-weight-updates, which checks broadcasts: weights stay on their GPU; leave out "
            "check-weight-updates",
        )
        + must(
            run.train.update_weight_transport == "nccl",
            "colocate with update-weight-transport disk: weights stay on their GPU; leave out update-weight-transport",
        )
    )


def _folders(train: TrainConfig, *, needs_weights: bool) -> list[str]:
    """One line for each missing folder of the critic's or the reference model's weights."""
    critic, reference = train.critic_load if has_critic(train) else None, train.ref_load
    needed = ["config.json", *(["*.safetensors"] if needs_weights else [])]
    missing = [] if critic is None else [name for name in needed if not any(critic.glob(name))]
    lines = must(
        not missing,
        f"critic-load {critic} has no {', no '.join(missing)}; give a local folder in Hugging Face format",
    )
    return lines + must(reference is None or reference.is_dir(), f"ref-load {reference}: no such folder")


def _reward(reward: RewardConfig, data: DataConfig, *, set_by_episodes: bool) -> list[str]:
    custom, kind = reward.custom_rm_path is not None, reward.rm_type
    bare, wrong_key = (kind or "").removeprefix(BOXED), key_problem(kind or "", reward.reward_key)
    has_own_types = data.metadata_key is not None
    return [
        *must(
            custom or kind is not None or set_by_episodes or (has_own_types and not data.streaming_data),
            "no reward is set: give rm-type or custom-rm-path",
        ),
        *must(
            custom or kind is None or bare in WITHOUT_LABEL or data.label_key is not None,
            f"rm-type {kind} without label-key: the reward compares with a label; give label-key",
        ),
        *must(
            custom or bare != "ifeval" or has_own_types,
            f"rm-type {kind} without metadata-key: the instructions are in the metadata; give metadata-key",
        ),
        *must(
            custom or bare != REMOTE or reward.rm_url is not None,
            f"rm-type {kind} without rm-url; give the URL of the service",
        ),
        *must(custom or wrong_key is None, f"{wrong_key}"),
        *must(
            custom or not reward.group_rm,
            "group-rm without custom-rm-path: built-in rewards see one response; leave out group-rm",
        ),
    ]


def _staleness(rollout: RolloutConfig) -> list[str]:
    allowed, interval = rollout.staleness, rollout.update_weights_interval
    return must(
        allowed >= interval - 1,
        f"max-staleness {allowed} is impossible with update-weights-interval {interval}: the engines keep their "
        f"weights for {interval} steps, so the last of these trains on tokens {interval - 1} steps old; "
        f"give max-staleness {interval - 1} or more",
    )


def _episodes(episodes: EpisodeConfig, rollout: RolloutConfig, data: DataConfig) -> list[str]:
    most, size = episodes.max_episodes, rollout.n_samples_per_prompt
    context, prompt = episodes.rollout_max_context_len, data.rollout_max_prompt_len
    return must(
        most is None or most >= size, f"max-episodes {most} must be at least n-samples-per-prompt {size}"
    ) + must(
        context is None or context > (prompt or 1),
        f"rollout-max-context-len {context} must be above {f'rollout-max-prompt-len {prompt}' if prompt else 1}: a "
        "response has at least one token",
    )


def _supply(rollout: RolloutConfig) -> list[str]:
    batch, over = rollout.rollout_batch_size, rollout.over_sampling_batch_size
    return must(
        over is None or over >= batch, f"over-sampling-batch-size {over} must be at least rollout-batch-size {batch}"
    ) + must(
        rollout.partial_rollout or not rollout.mask_offpolicy_in_partial_rollout,
        "mask-offpolicy-in-partial-rollout without partial-rollout: no group is resumed; give partial-rollout as well",
    )


def _batch(rollout: RolloutConfig, train: TrainConfig, hooks: HookConfig) -> list[str]:
    groups, each, samples = rollout.rollout_batch_size, rollout.n_samples_per_prompt, rollout.samples_per_step
    made = f"rollout-batch-size {groups} x n-samples-per-prompt {each} = {samples} samples"
    lines = must(
        each >= 2
        or train.advantage_estimator in ("reinforce_plus_plus", "ppo")
        or train.custom_advantage_function_path is not None
        or hooks.custom_reward_post_process_path is not None,
        f"advantage-estimator {train.advantage_estimator} compares responses to one prompt: n-samples-per-prompt must "
        f"be at least 2, got {each}",
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
        f"num-steps-per-rollout {updates}{derived} does not divide rollout-batch-size {groups}: groups are not split",
    )


def _estimator(train: TrainConfig) -> list[str]:
    name = train.advantage_estimator
    return (
        must(
            normalize_advantages(train) or not name.startswith("reinforce_plus_plus"),
            f"no-normalize-advantages with advantage-estimator {name}, whose baseline is the mean over the step; leave "
            "out no-normalize-advantages",
        )
        + must(
            train.eps_clip_c is None or name != "cispo",
            "eps-clip-c with advantage-estimator cispo, which already bounds the ratio; leave out eps-clip-c",
        )
        + must(
            train.gamma == 1.0 or name in ("reinforce_plus_plus", "ppo"),
            f"gamma {train.gamma:g} with advantage-estimator {name}, which does not discount rewards; leave out gamma",
        )
        + _critic(train)
        + _custom(train)
    )


def _custom(train: TrainConfig) -> list[str]:
    lines = must(
        train.custom_advantage_function_path is None or not has_critic(train),
        "custom-advantage-function-path with advantage-estimator ppo, whose critic learns from ppo's returns; give "
        "another estimator",
    )
    clips = {
        "eps-clip": train.eps_clip != 0.2,
        "eps-clip-high": train.eps_clip_high is not None,
        "eps-clip-c": train.eps_clip_c is not None,
    }
    names = ", ".join(name for name, is_given in clips.items() if is_given)
    lines += must(
        train.custom_tis_function_path is None or train.use_tis,
        "custom-tis-function-path without use-tis: the function would not be called; give use-tis as well",
    )
    return lines + must(
        train.custom_loss_function_path is None or not names,
        f"{names} with custom-loss-function-path, which replaces the clipping: give them as its arguments, "
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
        not names,
        f"{names} with advantage-estimator {train.advantage_estimator}, which has no critic; give ppo, or "
        f"leave out {names}",
    )


def _critic_only(num_steps: int, num_rollout: int) -> list[str]:
    return must(
        not 0 < num_steps >= num_rollout,
        f"num-critic-only-steps {num_steps} of num-rollout {num_rollout}: the policy is never trained; give fewer",
    )


def _reference(train: TrainConfig) -> list[str]:
    lines = must(
        train.kl_coef == 0
        or train.advantage_estimator not in ("grpo", "gspo", "cispo")
        or train.custom_advantage_function_path is not None,
        f"kl-coef {train.kl_coef:g} with advantage-estimator {train.advantage_estimator}, which has one reward per "
        "response; give use-kl-loss and kl-loss-coef instead",
    )
    lines += must(
        train.kl_coef == 0 or train.kl_loss_coef == 0,
        f"kl-coef {train.kl_coef:g} and kl-loss-coef {train.kl_loss_coef:g} charge the same KL twice; give one of them",
    )
    for name, given in {"kl-loss-coef": train.kl_loss_coef > 0, "use-unbiased-kl": train.use_unbiased_kl}.items():
        lines += must(
            train.use_kl_loss or not given, f"{name} without use-kl-loss: the loss has no KL; give use-kl-loss as well"
        )
    return lines


def _transport(train: TrainConfig) -> list[str]:
    if train.update_weight_transport != "disk":
        return must(
            train.update_weight_disk_dir is None,
            f"update-weight-disk-dir {train.update_weight_disk_dir} with update-weight-transport nccl, which writes "
            "no files; give update-weight-transport disk",
        )
    given = {
        "update-weights-during-training": train.update_weights_during_training,
        "check-weight-updates": train.check_weight_updates,
    }
    names = ", ".join(name for name, is_given in given.items() if is_given)
    return must(
        train.update_weight_disk_dir is not None,
        "update-weight-transport disk without update-weight-disk-dir; give a folder that trainer and engines share",
    ) + must(
        not names,
        f"{names} with update-weight-transport disk, which has no copy on a GPU and no checksum; leave out {names}",
    )


def _corrections(train: TrainConfig) -> list[str]:
    tis = {
        "tis-mode": train.tis_mode != "truncate",
        "tis-level": train.tis_level != "token",
        "tis-clip": train.tis_clip != 2.0,
        "tis-clip-low": train.tis_clip_low != 0.0,
    }
    given = ", ".join(name for name, is_given in tis.items() if is_given)
    return (
        must(
            train.use_tis or not given, f"{given} without use-tis: there are no weights to bound; give use-tis as well"
        )
        + must(
            train.use_opsm or train.opsm_delta == 1e-4,
            "opsm-delta without use-opsm: no response is left out; give use-opsm as well",
        )
        + must(
            not (train.use_tis and train.use_rollout_logprobs),
            "use-tis with use-rollout-logprobs, whose ratio already corrects for the engine; leave one of them out",
        )
        + _score_centering(train)
        + must(
            train.tis_clip_low <= train.tis_clip,
            f"tis-clip-low {train.tis_clip_low:g} must be at most tis-clip {train.tis_clip:g}",
        )
    )


def _score_centering(train: TrainConfig) -> list[str]:
    if not train.use_score_centering:
        return must(
            train.score_centering_top_k == 128,
            "score-centering-top-k without use-score-centering: no score is centered; give use-score-centering as well",
        )
    sequences = "whose ratio is that of a whole response; scores are centered token by token"
    refused = {
        "advantage-estimator gspo, " + sequences: train.advantage_estimator == "gspo",
        "advantage-estimator cispo, which has another weight of the score": train.advantage_estimator == "cispo",
        f"tis-level {train.tis_level}, {sequences}": train.use_tis and train.tis_level != "token",
        "custom-loss-function-path, which replaces the same loss": train.custom_loss_function_path is not None,
        "custom-tis-function-path, whose weights of other tokens are not known": train.custom_tis_function_path
        is not None,
        "eps-clip-c, which bounds a ratio that this loss does not have": train.eps_clip_c is not None,
    }
    return [f"use-score-centering with {why}; leave one of them out" for why, is_given in refused.items() if is_given]


def _checkpoints(checkpoint: CheckpointConfig) -> list[str]:
    lines = [
        f"{name} {path} is not a folder; give another path"
        for name, path in {"save": checkpoint.save, "load": checkpoint.load}.items()
        if path is not None and path.exists() and not path.is_dir()
    ]
    needing = {
        "save-interval": checkpoint.save_interval,
        "save-interval-minutes": checkpoint.save_interval_minutes,
        "keep-checkpoints": checkpoint.keep_checkpoints,
    }
    lines += [
        f"{name} {value} without save; give the folder for checkpoints"
        for name, value in needing.items()
        if value is not None and checkpoint.save is None
    ]
    return lines + must(
        checkpoint.ckpt_step is None or checkpoint.load is not None,
        f"ckpt-step {checkpoint.ckpt_step} without load; give the folder with the checkpoint",
    )


def _deadlines(failures: FailureConfig) -> list[str]:
    """The time limits must fire in order: the watchdog last, because its message names the least specific cause."""
    request, control, attempts = failures.request_timeout_s, failures.control_timeout_s, failures.max_sample_retries + 1
    longest = max(request * attempts + 10 * failures.max_sample_retries, failures.reward_timeout_s)
    return must(
        request > control,
        f"request-timeout-s {request:g} must be above control-timeout-s {control:g}: requests get no token during a "
        "weight update",
    ) + must(
        failures.watchdog_timeout_s > longest,
        f"watchdog-timeout-s {failures.watchdog_timeout_s:g} must be above {longest:g}, the longest time in which one "
        f"sample can fail (request-timeout-s x attempts plus 10 s between them, or reward-timeout-s)",
    )


def _output(output: OutputConfig, checkpoint: CheckpointConfig) -> list[str]:
    """The run directory must be new, empty, left by a run that reported no step, or, with ``load``, left by any run."""
    path = output.run_dir
    if path is None or not path.exists():
        return []
    if not path.is_dir():
        return [f"run-dir {path} is not a folder; give another path"]
    if not (path / "versions.json").is_file():
        return must(not any(path.iterdir()), f"run-dir {path} is not empty and not from a run; give another folder")
    rows = path / "metrics.jsonl"
    may_append = checkpoint.load is not None or not rows.is_file() or rows.stat().st_size == 0
    return must(may_append, f"run-dir {path} has the steps of another run; give load to resume it, or another folder")


def _file(setting: str, path: Path) -> list[str]:
    file, _ = sliced(path)
    if path == file and "@[" in path.name and not path.is_file():
        return [f"{setting} {path}: not a slice of rows; FILE@[a:b] has the rows a to b, with whole numbers or nothing"]
    return must(file.is_file(), f"{setting} {file}: {'is a folder' if file.is_dir() else 'no such file'}")
