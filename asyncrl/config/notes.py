"""The notes of a run: what its flags say that it does already, or does in another way."""

from asyncrl.config.areas import RunConfig
from asyncrl.config.areas.train import TrainConfig
from asyncrl.config.eval_sets import eval_sets
from asyncrl.config.slime.accepted import written
from asyncrl.config.slime.status import Kind
from asyncrl.config.slime.table import TABLE


def notes_of(run: RunConfig) -> list[str]:
    """One line for all flags that are true anyway together, and one for each setting or flag without effect."""
    already = [written(name, value) for name, value in run.foreign.items() if TABLE[name].kind is Kind.TRUE_ANYWAY]
    others = [
        f"{written(name, value)} has no effect: {TABLE[name].text}"
        for name, value in run.foreign.items()
        if TABLE[name].kind is Kind.DIFFERENT
    ]
    together = [f"true anyway, so these flags may be left out: {', '.join(already)}"] if already else []
    return [*together, *others, *_settings(run), *_objective(run.train), *_attributes(run), *_draws(run)]


def _attributes(run: RunConfig) -> list[str]:
    """One line for each key of the user's file that is a flag of slime, but has no effect in asyncrl."""
    rows = ((key, TABLE.get(key.replace("_", "-"))) for key in run.attributes)
    return [
        f"{key} of custom-config-path is an attribute of args, and otherwise has no effect: {row.text}"
        for key, row in rows
        if row is not None
    ]


def _draws(run: RunConfig) -> list[str]:
    """One line if greedy evaluation changes the draws of training that seeds would repeat (docs/running.md)."""
    rollout = run.rollout
    is_seeded = run.cluster.device != "cpu" and "enable-deterministic-inference" in run.sglang
    is_limited = rollout.rollout_top_p < 1 or rollout.rollout_top_k != -1  # all draws are of one kind then
    is_greedy = run.evaluation.eval_interval is not None and any(each.temperature == 0 for each in eval_sets(run))
    if not is_seeded or is_limited or not is_greedy:
        return []
    return [
        "sglang-enable-deterministic-inference with an evaluation at temperature 0: an evaluation during training "
        "changes the training samples of the same batches; give eval-temperature 1 to repeat them"
    ]


def _objective(train: TrainConfig) -> list[str]:
    """One line for each setting that the objective of the run does not have."""
    name = train.advantage_estimator
    unused = {
        "eps-clip": (train.use_score_centering and train.eps_clip != 0.2, "use-score-centering clips no ratio"),
        "eps-clip-high": (
            train.use_score_centering and train.eps_clip_high is not None,
            "use-score-centering clips no ratio",
        ),
        "use-rollout-logprobs": (
            train.use_score_centering and train.use_rollout_logprobs,
            "use-score-centering compares with no log-probs from before the step",
        ),
        "disable-grpo-std-normalization": (
            train.disable_grpo_std_normalization and name not in ("grpo", "gspo", "cispo"),
            f"advantage-estimator {name} divides by no standard deviation of a group",
        ),
        "tis-clip": (train.tis_mode == "whole" and train.tis_clip != 2.0, "tis-mode whole bounds no weight"),
        "tis-clip-low": (train.tis_mode == "whole" and train.tis_clip_low != 0.0, "tis-mode whole bounds no weight"),
    }
    return [f"{setting} has no effect: {why}" for setting, (is_given, why) in unused.items() if is_given]


def _settings(run: RunConfig) -> list[str]:
    """One line for each setting that another one overrides."""
    lines = []
    if run.train.use_dynamic_batch_size and run.train.micro_batch_size is not None:
        lines.append(
            f"micro-batch-size {run.train.micro_batch_size} has no effect: use-dynamic-batch-size fills microbatches "
            f"up to max-tokens-per-gpu {run.train.max_tokens_per_gpu}"
        )
    if "moe_act" in run.parallel.recompute_modules:
        lines.append(
            "recompute-modules moe_act has no effect: the activation of experts keeps nothing that could be recomputed"
        )
    if run.rollout.partial_rollout and run.rollout.staleness == 0:
        lines.append(
            "partial-rollout has little effect with max-staleness 0: tokens from before an update are masked, where "
            "slime trains them"
        )
    if run.cluster.colocate and run.cluster.rollout_num_gpus is not None:
        lines.append(
            f"rollout-num-gpus {run.cluster.rollout_num_gpus} has no effect: with colocate the engines have the "
            f"trainer's {run.cluster.num_trainer_ranks} GPUs"
        )
    if run.cluster.colocate and "use-fault-tolerance" in run.foreign and run.failures.max_engine_restarts is None:
        lines.append("with colocate no engine restarts: a lost engine ends the run")
    return lines
