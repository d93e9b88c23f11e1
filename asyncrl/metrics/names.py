"""The declarations of all numbers that a run reports: name, unit and meaning.

A part of a name in capitals stands for any text: ``filter/REASON``.  ``docs/metrics.md`` lists every name, and a test
checks that.  A number that does not exist (no update followed the step, no token was trained) is left out of its row.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One reported number."""

    name: str
    unit: str
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("step", "step", "training step of this row, counted from 0"),
    Metric("version", "update", "weights that the engines serve after the step, counted in weight updates"),
    Metric("reward/mean", "reward", "mean reward of the samples of the batch"),
    Metric("reward/std", "reward", "standard deviation of the rewards of the batch"),
    Metric("reward/part/NAME", "", "mean of one numeric entry of dict rewards over the samples that have it"),
    Metric("time/reward_outage_s", "s", "time since the start for which every call to the rewards' service failed"),
    Metric("eval/accuracy", "reward", "mean reward on held-out prompts; with several sets, the mean over the sets"),
    Metric("eval/NAME/accuracy", "reward", "mean reward on one set of held-out prompts; only with several sets"),
    Metric("eval/NAME/reward", "reward", "mean reward of the answers to one set of held-out prompts"),
    Metric("eval/NAME/reward_ci95", "reward", "half the width of its 95 % confidence interval, clustered by prompt"),
    Metric("eval/NAME/pass@NUM", "share", "probability that at least one of NUM answers is right, 0 to 1"),
    Metric("eval/NAME/pass@NUM_ci95", "share", "half the width of its 95 % confidence interval over the prompts"),
    Metric(
        "eval/NAME/majority@NUM", "share", "probability that the most frequent final answer of NUM is right, 0 to 1"
    ),
    Metric("eval/NAME/majority@NUM_ci95", "share", "half the width of its 95 % confidence interval over the prompts"),
    Metric("eval/NAME/truncated", "share", "answers of the set that were cut at the length limit, 0 to 1"),
    Metric("eval/NAME/tokens_mean", "token", "mean length of the set's answers"),
    Metric("eval/NAME/tokens_max", "token", "longest answer of the set"),
    Metric("eval/NAME/failed", "sample", "answers of the set left out because an engine or the reward failed"),
    Metric("eval/function/NAME", "", "number that a user's evaluation function reports (--eval-function-path)"),
    Metric("eval/failed", "sample", "held-out answers left out because an engine or the reward failed"),
    Metric("eval/version", "update", "weights that were served when the evaluation began"),
    Metric("eval/step", "step", "training steps that produced the evaluated weights"),
    Metric("lag/max", "step", "largest lag of a trained token: step that trains on it minus step of its weights"),
    Metric("lag/mean", "step", "mean lag over trained tokens"),
    Metric("rollout/routes_missing", "share", "positions of the batch whose experts the engine did not tell, 0 to 1"),
    Metric("tokens/generated", "token", "generated so far: the sum of the next six numbers"),
    Metric("tokens/trained", "token", "trained on so far"),
    Metric("tokens/masked", "token", "in a trained group, but left out of the loss, so far"),
    Metric("tokens/filtered", "token", "in a group that the filter dropped, so far"),
    Metric(
        "tokens/stale",
        "token",
        "too old to train on, or of an answer with a grammar that began anew or was given up, so far",
    ),
    Metric("tokens/failed", "token", "in a group that failed, so far"),
    Metric("tokens/held", "token", "in groups in flight, buffered or being trained, now"),
    Metric("tokens/observed", "token", "of observations in groups that were scored and then left, so far; in no sum"),
    Metric(
        "tokens/lost", "token", "of groups in flight when a run was killed that this one recovers, so far; in no sum"
    ),
    Metric("tokens/trained_copies", "token", "trained again in another sample of the same episode, so far; in no sum"),
    Metric("groups/admitted", "group", "admitted so far: the sum of the next eight numbers"),
    Metric("groups/trained", "group", "trained on so far"),
    Metric("groups/filtered", "group", "dropped by the filter so far"),
    Metric("groups/stale", "group", "dropped as too old so far"),
    Metric("groups/failed", "group", "failed so far"),
    Metric("groups/in_flight", "group", "admitted and not yet scored, now"),
    Metric("groups/partial", "group", "interrupted and waiting to resume, now"),
    Metric("groups/buffered", "group", "kept and waiting for a batch, now"),
    Metric("groups/training", "group", "in the batch being trained, now"),
    Metric(
        "prompts/quarantined",
        "prompt",
        "of rows that kept failing (--max-row-failures), left out, so far",
    ),
    Metric("prompts/returned", "prompt", "of stale groups, waiting to start again, now"),
    Metric("filter/acceptance", "share", "groups that the filter kept, among its last 256 verdicts, 0 to 1"),
    Metric("filter/REASON", "group", "dropped by the filter for this reason, so far"),
    Metric("retries", "attempt", "started after a failure, so far"),
    Metric(
        "aborts",
        "attempt",
        "ended on purpose: for a weight update (--weight-update-mode abort), to give the trainer the GPUs, or to drain "
        "a slow engine",
    ),
    Metric("engines/serving", "engine", "engines that get requests, now; fewer while one is lost"),
    Metric(
        "engines/slow", "engine", "drained and restarted because they were slow (--slow-engine-share), since the start"
    ),
    Metric("trainer/restarts", "restart", "of the trainer within the run (--max-trainer-restarts), since the start"),
    Metric("time/without_training_s", "s", "time since the start without a trainer, which died and was started again"),
    Metric("samples/in_flight", "sample", "slots in use, now"),
    Metric("samples/slots", "sample", "slots in total"),
    Metric("samples/limit", "sample", "slots that the engines' KV caches can serve, now"),
    Metric("response/tokens_mean", "token", "mean length of the batch's answers"),
    Metric("response/tokens_max", "token", "longest answer of the batch"),
    Metric("response/truncated", "share", "answers of the batch that were cut at the length limit, 0 to 1"),
    Metric("episodes/open", "episode", "started and not ended, now"),
    Metric("episodes/finished", "episode", "ended by themselves, since the start"),
    Metric("episodes/max_turns", "episode", "ended by --max-turns, since the start"),
    Metric("episodes/context_full", "episode", "ended by --rollout-max-context-len, since the start"),
    Metric("episodes/tool_failed", "episode", "ended by a tool that failed, since the start"),
    Metric("episodes/cancelled", "episode", "cancelled because their group was dropped, since the start"),
    Metric("episodes/failed", "episode", "ended by an error, which cost their group, since the start"),
    Metric("episodes/tool_s", "s", "in tools and other user code, over the episodes that ended within the step"),
    Metric("episodes/engine_s", "s", "on engines, over the episodes that ended within the step"),
    Metric("episodes/tool_share", "share", "episodes/tool_s, divided by the sum of both, 0 to 1"),
    Metric("episodes/branches/REASON", "branch", "further samples of the episodes that ended within the step"),
    Metric("episodes/tool_calls", "call", "of tools, over the episodes that ended within the step"),
    Metric("episodes/tool_errors", "call", "of tools that failed, over the episodes that ended within the step"),
    Metric("episodes/dropped_tokens", "token", "of turns that a later context of their conversation lacks"),
    Metric("episodes/retokenized_tokens", "token", "of turns that a client sent as text and that were tokenised again"),
    Metric("episodes/unmatched_tokens", "token", "trained, although no turn of the episode has them (slime's files)"),
    Metric("episodes/moved_tokens", "token", "trained behind other tokens than the engine saw (slime's files)"),
    Metric("episodes/logprobs_differ", "token", "whose rollout_log_probs are not the engine's, which are used"),
    Metric("episodes/cut_tokens", "token", "beyond --rollout-max-context-len, left out (slime's files)"),
    Metric("episodes/NAME", "", "sum of a number of user code, over the episodes that ended within the step"),
    Metric("turns/mean", "turn", "engine calls per episode of the batch, mean"),
    Metric("turns/max", "turn", "engine calls per episode of the batch, most"),
    Metric("length/started_mean", "token", "estimated mean length of recently started answers, finished or not"),
    Metric("length/started_p50", "token", "length that half of the recently started answers exceed"),
    Metric("length/started_p95", "token", "length that 5 % of the recently started answers exceed"),
    Metric("length/let_through_mean", "token", "mean length of recently trained or filtered answers"),
    Metric("length/let_through_p50", "token", "length that half of the recently trained or filtered answers exceed"),
    Metric("length/let_through_p95", "token", "length that 5 % of the recently trained or filtered answers exceed"),
    Metric(
        "length/ratio",
        "",
        "length/let_through_mean, divided by the mean if no answer had been dropped, cancelled or failed",
    ),
    Metric("length/bias", "share", "largest distance between the two distributions that length/ratio compares, 0 to 1"),
    Metric("length/bias_by_chance", "share", "length/bias expected by chance, if losses do not depend on length"),
    Metric("length/alarm", "", "1 while length/bias is beyond chance and large enough to matter, else 0"),
    Metric("length/finished", "sample", "generated to their end since the start"),
    Metric("length/cut", "sample", "stopped before their end since the start: dropped, cancelled or failed"),
    Metric("length/trained", "sample", "trained on since the start"),
    Metric("length/filtered", "sample", "ended, then dropped by the filter, since the start"),
    Metric("length/dropped", "sample", "ended, then dropped as stale or failed, since the start"),
    Metric("time/step_s", "s", "duration of the step: waiting, training, copying the weights"),
    Metric("time/train_s", "s", "duration of training, seen from the driver"),
    Metric("time/late_update_s", "s", "wait after training, for the previous update or for the engines' log-probs"),
    Metric("time/trainer_waited_s", "s", "wait of the trainer for a batch, within the step"),
    Metric("time/engines_idle_s", "s", "time without any sample in flight, within the step"),
    Metric("time/update_pause_s", "s", "pause of all generation for the weight update after the step"),
    Metric("time/update_s", "s", "duration of the whole weight update after the step"),
    Metric(
        "time/update_wait_s", "s", "wait of training until its weights were copied, or written, for the weight update"
    ),
    Metric("update/rank_bytes", "byte", "most bytes that an engine rank received, in relation to its needs"),
    Metric("update/rank_needed_bytes", "byte", "bytes of the tensors of which this rank holds any part"),
    Metric("time/hooks_s", "s", "wait of training for the user's hooks between the batch and the trainer"),
    Metric("log_function/errors", "call", "failed calls of the user's log functions, since the start"),
    Metric("log_function/skipped", "step", "steps that the user's log functions missed, since the start"),
    Metric("time/checkpoint_s", "s", "wait of training until its checkpoint was copied, or written (--no-async-save)"),
    Metric("time/loop_lag_ms", "ms", "longest delay of the driver's event loop"),
    Metric("throughput/tokens_generated_per_s", "token/s", "generated within the step, divided by its duration"),
    Metric("throughput/tokens_trained_per_s", "token/s", "trained on within the step, divided by its duration"),
    Metric("train/skipped", "", "1 if the batch changed no weights, because its loss or gradient was not finite"),
    Metric("train/repeated_passes", "pass", "passes that ran out of memory and were repeated in smaller microbatches"),
    Metric("train/loss", "", "loss of the step"),
    Metric("train/grad_norm", "", "gradient norm before clipping"),
    Metric("train/clip_fraction", "share", "trained tokens whose probability ratio was clipped, 0 to 1"),
    Metric("train/entropy", "nat", "mean policy entropy per trained token"),
    Metric("train/kl", "nat", "KL estimate of the policy from the reference model per trained token (--use-kl-loss)"),
    Metric(
        "train/reward_kl",
        "nat",
        "KL estimate at the start of the step, per trained token, as subtracted from the rewards (--kl-coef)",
    ),
    Metric("train/tis_weight", "", "mean off-policy weight per trained token, after truncation or masking (--use-tis)"),
    Metric("train/tis_outside", "share", "trained tokens whose weight was outside the bounds, 0 to 1 (--use-tis)"),
    Metric(
        "train/tis/NAME",
        "",
        "number that a custom correction reports, mean per trained token (--custom-tis-function-path)",
    ),
    Metric(
        "train/tis_removed",
        "share",
        "trained tokens that a custom correction removed from the loss, 0 to 1 (same flag)",
    ),
    Metric(
        "train/unknown_logprobs",
        "share",
        "trained tokens without log-probs of the engine, 0 to 1; those of the trainer before the step replace them",
    ),
    Metric(
        "train/score_subtracted",
        "",
        "mean absolute coefficient of the subtracted score per trained token (--use-score-centering)",
    ),
    Metric(
        "train/score_uncentered",
        "share",
        "trained tokens whose score is not centered, for lack of likeliest ids, 0 to 1 (same flag)",
    ),
    Metric(
        "train/routes_differ",
        "share",
        "experts of replayed tokens that the trainer's routers would not have chosen, 0 to 1, over all mixture layers",
    ),
    Metric(
        "routes_differ/age/NUM",
        "share",
        "train/routes_differ over the positions that predict the trained tokens whose lag is NUM steps",
    ),
    Metric(
        "routes_differ/position/NUM",
        "share",
        "train/routes_differ over the positions that predict a range of trained tokens, from response token NUM on",
    ),
    Metric(
        "train/routes_missing",
        "share",
        "input tokens without routes of the engine, 0 to 1; their routers choose for themselves",
    ),
    Metric("train/opsm_masked", "share", "trained tokens left out as too far off-policy, 0 to 1 (--use-opsm)"),
    Metric(
        "train/custom/NAME",
        "",
        "number that a custom loss reports, mean per trained token (--custom-loss-function-path)",
    ),
    Metric("train/value_loss", "", "squared error of the critic's values per trained token (ppo)"),
    Metric("train/value_clip_fraction", "share", "trained tokens whose value moved beyond --value-clip, 0 to 1 (ppo)"),
    Metric("train/critic_grad_norm", "", "gradient norm of the critic before clipping (ppo)"),
    Metric("train/lr", "", "learning rate"),
    Metric("train/peak_memory_gb", "GB", "peak memory of tensors on the first trainer GPU in the step"),
    Metric(
        "train/logprob_diff",
        "nat",
        "mean absolute difference of engine and trainer log-probs under the same weights; "
        "replayed routes of older weights add to it",
    ),
    Metric(
        "prompts/surprise_ratio",
        "",
        "negative log-prob of a few prompts, divided by that of the same prompts with all ids off by one; every four "
        "steps",
    ),
    Metric(
        "engine/NUM/logprob_diff",
        "nat",
        "train/logprob_diff of the engine whose log is sglang-NUM.log, over a few answers that all engines scored; "
        "every four steps, with several engines",
    ),
    Metric(
        "mismatch/logprob_mean",
        "nat",
        "mean absolute difference of the engine's log-prob and the trainer's before the step, over trained tokens",
    ),
    Metric("mismatch/logprob_p99", "nat", "99th percentile of that difference"),
    Metric("mismatch/logprob_max", "nat", "largest such difference"),
    Metric(
        "mismatch/k3",
        "nat",
        "k3 estimate of the KL of the engine's policy from the trainer's before the step, per trained token",
    ),
    Metric("mismatch/age/NUM/logprob_mean", "nat", "mismatch/logprob_mean over the tokens whose lag is NUM steps"),
    Metric("mismatch/age/NUM/logprob_p99", "nat", "mismatch/logprob_p99 over the tokens whose lag is NUM steps"),
    Metric("mismatch/age/NUM/logprob_max", "nat", "mismatch/logprob_max over the tokens whose lag is NUM steps"),
    Metric("mismatch/age/NUM/k3", "nat", "mismatch/k3 over the tokens whose lag is NUM steps"),
    Metric(
        "mismatch/position/NUM/logprob_mean",
        "nat",
        "mismatch/logprob_mean over a range of response tokens that begins at token NUM",
    ),
    Metric(
        "mismatch/position/NUM/logprob_p99",
        "nat",
        "mismatch/logprob_p99 over a range of response tokens that begins at token NUM",
    ),
    Metric(
        "mismatch/position/NUM/logprob_max",
        "nat",
        "mismatch/logprob_max over a range of response tokens that begins at token NUM",
    ),
    Metric("mismatch/position/NUM/k3", "nat", "mismatch/k3 over a range of response tokens that begins at token NUM"),
)
