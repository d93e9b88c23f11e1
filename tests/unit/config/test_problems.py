import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import RolloutConfig, TrainConfig, check_passthrough, derived, flat, missing_files
from asyncrl.errors import ConfigError
from tests.unit.config.runs import complaints, complete, load, problems


def test_a_complete_run_has_no_problems(tmp_path: Path) -> None:
    assert problems(load(tmp_path)) == []


def test_an_interrupted_download_of_the_model_is_one_line(tmp_path: Path) -> None:
    run = load(tmp_path)
    folder = run.model.hf_checkpoint
    index, names = folder / "model.safetensors.index.json", [f"model-{number}.safetensors" for number in (1, 2, 3)]
    (folder / names[0]).touch()
    index.write_text(json.dumps({"weight_map": {f"{name}.weight": name for name in names}}))
    lost = "model-2.safetensors (2 files of its index are missing)"
    assert problems(run) == [f"hf-checkpoint {folder} has no {lost}"]
    assert missing_files(run, needs_weights=False) == []
    (folder / names[1]).touch()
    assert problems(run) == [f"hf-checkpoint {folder} has no model-3.safetensors"]
    (folder / names[2]).touch()
    assert problems(run) == []
    for text in ("{}", "[]", "not JSON", '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        assert problems(run) == [], text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--n-samples-per-prompt 1", "at least 2, got 1"),
        ("--max-episodes 3", "max-episodes 3 must be at least n-samples-per-prompt 4"),
        ("--rollout-max-context-len 1", "rollout-max-context-len 1 must be above 1: a response has at least one token"),
        (
            "--rollout-max-context-len 100 --rollout-max-prompt-len 100",
            "rollout-max-context-len 100 must be above rollout-max-prompt-len 100: a response has at least one token",
        ),
        (
            "--global-batch-size 5",
            "x n-samples-per-prompt 4 = 32 samples, which is not a multiple of global-batch-size 5",
        ),
        ("--transformer-impl transformer_engine --device cpu", "transformer-impl transformer_engine with device cpu"),
        (
            "--transformer-impl transformer_engine --recompute-granularity selective --recompute-modules layernorm",
            "recompute-modules layernorm with transformer-impl transformer_engine",
        ),
        (
            "--streaming-data --data-source-path mine.py:Mine",
            "mine.py:Mine, which gives prompts; leave out streaming-data",
        ),
        ("--global-batch-size 8 --num-steps-per-rollout 2", "but global-batch-size 8 x num-steps-per-rollout 2 = 16"),
        (
            "--num-steps-per-rollout 3",
            "num-steps-per-rollout 3 does not divide rollout-batch-size 8: groups are not split",
        ),
        ("--global-batch-size 2", "num-steps-per-rollout 16 (from global-batch-size 2) does not divide rollout-batch"),
        ("--global-batch-size 64", "= 32 samples, which is not a multiple of global-batch-size 64"),
        (
            "--update-weights-interval 3 --max-staleness 1",
            "max-staleness 1 is impossible with update-weights-interval 3",
        ),
        ("--update-weight-transport disk", "update-weight-transport disk without update-weight-disk-dir"),
        ("--update-weight-disk-dir here", "here with update-weight-transport nccl, which writes no files"),
        (
            "--update-weight-transport disk --update-weight-disk-dir here --check-weight-updates",
            "check-weight-updates with update-weight-transport disk",
        ),
        ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "rollout-num-gpus 3 is not a multiple of"),
        (
            "--colocate --max-staleness 1",
            "colocate with max-staleness 1: engines have no memory while the trainer works",
        ),
        (
            "--colocate --max-staleness 0 --actor-num-gpus-per-node 3 --rollout-num-gpus-per-engine 2",
            "the trainer's 3 GPUs (actor-num-nodes x actor-num-gpus-per-node) are not a multiple of rollout-num-gpus",
        ),
        (
            "--colocate --max-staleness 0 --update-weight-transport disk --update-weight-disk-dir here",
            "colocate with update-weight-transport disk: weights stay on their GPU",
        ),
        (
            "--colocate --max-staleness 0 --max-engine-restarts 2",
            "colocate with max-engine-restarts 2: an engine cannot start while the trainer has its GPUs",
        ),
        (
            "--colocate --max-staleness 0 --max-trainer-restarts 2",
            "max-trainer-restarts 2: with colocate, the trainer's ranks cannot start while engines have their GPUs",
        ),
        (
            "--max-trainer-restarts 1",
            "max-trainer-restarts 1: a restart needs the checkpoints and the journal of --sav",
        ),
        (
            "--colocate --max-staleness 0 --update-weights-during-training",
            "colocate with update-weights-during-training: engines take weights only while the trainer is paused",
        ),
        ("--colocate --max-staleness 0 --check-weight-updates", "colocate with check-weight-updates, which checks"),
        ("--request-timeout-s 100", "request-timeout-s 100 must be above control-timeout-s 120"),
        ("--request-timeout-s 600", "watchdog-timeout-s 1800 must be above 2430"),
        ("--reward-timeout-s 3600", "watchdog-timeout-s 1800 must be above 3600"),
        ("--eval-interval 2", "eval-interval 2 without eval-prompt-data; give NAME PATH pairs"),
        ("--save-interval 5", "save-interval 5 without save; give the folder for checkpoints"),
        ("--save-interval-minutes 5", "save-interval-minutes 5.0 without save; give the folder for checkpoints"),
        ("--ckpt-step 5", "ckpt-step 5 without load; give the folder with the checkpoint"),
        ("--eval-prompt-data held nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("--prompt-data nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("--prompt-data /", "prompt-data /: is a folder"),
        ("--prompt-data all.parquet@[0:9]", "all.parquet: no such file"),
        ("--prompt-data all.jsonl@[0:9:2]", "all.jsonl@[0:9:2]: not a slice of rows; FILE@[a:b] has the rows a to b"),
        ("--hf-checkpoint Qwen/Qwen3-0.6B", "no such folder; give a local folder in Hugging Face format"),
        ("--hf-checkpoint /usr", "hf-checkpoint /usr has no config.json, no tokenizer.json, no *.safetensors"),
        (
            "--advantage-estimator reinforce_plus_plus --no-normalize-advantages",
            "no-normalize-advantages with advantage-estimator reinforce_plus_plus, whose baseline",
        ),
        ("--advantage-estimator cispo --eps-clip-c 3", "eps-clip-c with advantage-estimator cispo"),
        ("--critic-lr 1 --lambd 0.9", "lambd, critic-lr with advantage-estimator grpo, which has no critic; give ppo"),
        ("--advantage-estimator ppo --critic-load /usr", "critic-load /usr has no config.json, no *.safetensors"),
        (
            "--advantage-estimator ppo --num-critic-only-steps 9 --num-rollout 9",
            "num-critic-only-steps 9 of num-rollout 9: the policy is never trained; give fewer",
        ),
        ("--value-clip 0.5", "value-clip with advantage-estimator grpo, which has no critic; give ppo"),
        (
            "--tis-mode mask --tis-clip 5",
            "tis-mode, tis-clip without use-tis: there are no weights to bound; give use-tis",
        ),
        ("--opsm-delta 0.5", "opsm-delta without use-opsm: no response is left out; give use-opsm"),
        ("--gamma 0.9", "gamma 0.9 with advantage-estimator grpo, which does not discount"),
        ("--kl-coef 0.1", "kl-coef 0.1 with advantage-estimator grpo, which has one reward per response"),
        (
            "--advantage-estimator reinforce_plus_plus --kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.2",
            "kl-coef 0.1 and kl-loss-coef 0.2 charge the same KL twice",
        ),
        ("--kl-loss-coef 0.1", "kl-loss-coef without use-kl-loss: the loss has no KL; give use-kl-loss"),
        ("--use-unbiased-kl", "use-unbiased-kl without use-kl-loss: the loss has no KL; give use-kl-loss"),
        ("--use-kl-loss --ref-load /nowhere", "ref-load /nowhere: no such folder"),
        (
            "--use-tis --use-rollout-logprobs",
            "use-tis with use-rollout-logprobs, whose ratio already corrects for the engine",
        ),
        ("--use-tis --tis-clip-low 3", "tis-clip-low 3 must be at most tis-clip 2"),
        ("--advantage-estimator gspo --n-samples-per-prompt 1", "advantage-estimator gspo compares responses"),
        ("--min-lr 1e-7", "min-lr with lr-decay-style constant, which has no decay; give cosine or linear"),
        ("--lr-decay-iters 9", "lr-decay-iters with lr-decay-style constant, which has no decay"),
        ("--lr-decay-style cosine --lr 1e-6 --min-lr 1e-5", "min-lr 1e-05 must be at most lr 1e-06"),
        (
            "--lr-decay-style linear --lr-warmup-iters 3",
            "lr-decay-iters 3 (from num-rollout) must be above lr-warmup-iters 3: the decay starts after the warm-up",
        ),
        (
            "--lr-decay-style linear --lr-decay-iters 5 --lr-warmup-iters 6",
            "lr-decay-iters 5 must be above lr-warmup-iters 6",
        ),
        (
            "--advantage-estimator ppo --lr-decay-style linear --num-critic-only-steps 2 --lr-warmup-iters 1",
            "lr-decay-iters 3 (from num-rollout) must be above num-critic-only-steps 2 + lr-warmup-iters 1",
        ),
        (
            "--advantage-estimator ppo --lr-decay-style linear --critic-lr 1e-7 --lr 1e-5 --min-lr 1e-6",
            "min-lr 1e-06 must be at most critic-lr 1e-07",
        ),
        (
            "--advantage-estimator ppo --lr-decay-style linear --critic-lr-warmup-iters 4",
            "lr-decay-iters 3 (from num-rollout) must be above critic-lr-warmup-iters 4",
        ),
        (
            "--lr-warmup-fraction 0.1 --lr-warmup-iters 1",
            "lr-warmup-fraction 0.1 with lr-warmup-iters 1; leave one out",
        ),
        (
            "--recompute-activations --recompute-granularity full",
            "recompute-activations with recompute-granularity full: it stands for recompute-granularity selective",
        ),
        (
            "--recompute-activations --recompute-num-layers 2",
            "recompute-num-layers without recompute-granularity full",
        ),
        ("--run-dir /usr", "run-dir /usr is not empty and not from a run; give another folder"),
        ("--run-dir /dev/null", "run-dir /dev/null is not a folder"),
    ],
)
def test_a_contradiction_is_one_line_with_the_numbers(tmp_path: Path, words: str, line: str) -> None:
    (found,) = complaints(*complete(tmp_path), *words.split())
    assert line in found


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--rollout-temperature 0", "rollout-temperature must be above 0, got 0.0"),
        ("--rollout-top-p 1.5", "rollout-top-p must be above 0 and at most 1, got 1.5"),
        ("--rollout-top-k 0", "rollout-top-k must be -1 (off) or at least 1, got 0"),
        ("--lr 0", "lr must be above 0, got 0.0"),
        (
            "--lr-decay-style inverse-square-root",
            '--lr-decay-style must be one of constant, cosine, linear, got "inverse-square-root"',
        ),
        ("--lr-decay-style WSD", '--lr-decay-style must be one of constant, cosine, linear, got "WSD"'),
        ("--lr-decay-iters 0", "lr-decay-iters must be at least 1, got 0"),
        ("--min-lr -1", "min-lr must be at least 0, got -1.0"),
        ("--lr-warmup-fraction 1", "lr-warmup-fraction must be below 1, got 1.0"),
        ("--num-rollout 0", "num-rollout must be at least 1, got 0"),
        ("--max-staleness -1", "max-staleness must be at least 0, got -1"),
        ("--adam-beta2 1", "adam-beta2 must be at least 0 and below 1, got 1.0"),
        ("--seed -1", "seed must be at least 0 and below 2**31, got -1"),
        ("--eval-prompt-data a", "eval-prompt-data must be NAME PATH pairs, got 1 words"),
        ("--eval-prompt-data a x a y", "eval-prompt-data names must differ, got a, a"),
        ("--reward-timeout-s 0", "reward-timeout-s must be above 0, got 0.0"),
        ("--micro-batch-size 0", "micro-batch-size must be at least 1, got 0"),
        ("--eps-clip-c 1", "eps-clip-c must be above 1, got 1.0"),
        ("--gamma 1.5", "gamma must be at least 0 and at most 1, got 1.5"),
        ("--lambd -1", "lambd must be at least 0 and at most 1, got -1.0"),
        ("--critic-lr 0", "critic-lr must be above 0, got 0.0"),
        ("--entropy-coef -1", "entropy-coef must be at least 0, got -1.0"),
        ("--tis-clip 0", "tis-clip must be above 0, got 0.0"),
        ("--actor-num-nodes 0", "actor-num-nodes must be at least 1, got 0"),
        ("--rollout-stop=", "rollout-stop must not contain an empty string"),
        ("--prompt-data", "prompt-data names no file; give JSONL or Parquet files"),
        ("--num-data-workers 0", "num-data-workers must be at least 1, got 0"),
        (
            "--apply-chat-template-kwargs {",
            "apply-chat-template-kwargs must be a JSON object, got '{': Expecting property name enclosed "
            "in double quotes: line 1 column 2 (char 1)",
        ),
        ("--apply-chat-template-kwargs [1]", "apply-chat-template-kwargs must be a JSON object, got '[1]'"),
        (
            '--apply-chat-template-kwargs {"tools":1}',
            "apply-chat-template-kwargs must not have tools: the run sets them",
        ),
        ("--rollout-max-prompt-len 0", "rollout-max-prompt-len must be at least 1, got 0"),
        ("--input-key=", "input-key must not be empty"),
    ],
)
def test_a_value_out_of_range_is_one_line(tmp_path: Path, words: str, line: str) -> None:
    assert complaints(*complete(tmp_path), *words.split()) == [line]


def test_on_shared_gpus_engines_have_every_gpu_of_the_trainer_and_are_not_restarted(tmp_path: Path) -> None:
    words = "--actor-num-nodes 2 --actor-num-gpus-per-node 4 --rollout-num-gpus-per-engine 2"
    shared = load(tmp_path, *words.split(), "--colocate", "--max-staleness", "0")
    assert problems(shared) == []
    assert (shared.cluster.num_rollout_gpus, shared.cluster.num_engines) == (8, 4)
    assert derived.max_engine_restarts(shared.failures, shared.cluster) == 0
    apart = load(tmp_path, *words.split(), "--rollout-num-gpus", "2")
    assert (apart.cluster.num_engines, derived.max_engine_restarts(apart.failures, apart.cluster)) == (1, 3)
    assert load(tmp_path).cluster.num_rollout_gpus == 1


def test_a_trainer_is_restarted_only_from_checkpoints_and_a_journal(tmp_path: Path) -> None:
    saved = ("--save", str(tmp_path / "saved"))
    limits = {
        flags: derived.max_trainer_restarts(load(tmp_path, *flags)) for flags in ((), saved, (*saved, "--no-journal"))
    }
    assert list(limits.values()) == [0, 3, 0]
    assert derived.max_trainer_restarts(load(tmp_path, *saved, "--no-save-optim")) == 0
    assert derived.max_trainer_restarts(load(tmp_path, *saved, "--max-trainer-restarts", "7")) == 7


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    words = "--prompt-data no.jsonl --eval-interval 1 --n-samples-per-prompt 1 --num-steps-per-rollout 3"
    assert len(complaints(*complete(tmp_path), *words.split())) == 4
    assert len(complaints(*complete(tmp_path), "--lr", "0", "--seed", "-1", "--rollout-top-p", "2")) == 3


def test_the_reward_is_one_of_two_and_built_in_ones_need_labels(tmp_path: Path) -> None:
    run = load(tmp_path)
    no_reward = replace(run, reward=replace(run.reward, rm_type=None), data=replace(run.data, streaming_data=True))
    no_label = replace(run, data=replace(run.data, label_key=None))
    own = replace(no_label, reward=replace(run.reward, rm_type=None, custom_rm_path="a:b"))
    assert problems(no_reward) == ["no reward is set: give rm-type or custom-rm-path"]
    assert problems(no_label) == ["rm-type exact without label-key: the reward compares with a label; give label-key"]
    assert problems(own) == []


def test_the_decay_of_the_learning_rate_ends_with_the_run_unless_it_is_given(tmp_path: Path) -> None:
    run = load(tmp_path, "--num-rollout", "30", "--lr-decay-style", "cosine", "--lr-warmup-fraction", "0.1")
    assert problems(run) == []
    assert derived.lr_decay_iters(run.train, run.rollout) == 30
    assert derived.lr_warmup_iters(run.train, 30) == 3
    longer = load(tmp_path, "--lr-decay-style", "cosine", "--lr-decay-iters", "100", "--lr-warmup-iters", "7")
    assert derived.lr_decay_iters(longer.train, longer.rollout) == 100
    assert derived.lr_warmup_iters(longer.train, 100) == 7


def test_recompute_activations_is_selective_recomputation(tmp_path: Path) -> None:
    short, written_out = (
        load(tmp_path, *words)
        for words in (["--recompute-activations"], ["--recompute-activations", "--recompute-granularity", "selective"])
    )
    assert (short.parallel.recomputes, written_out.parallel.recomputes) == ("selective", "selective")
    assert load(tmp_path, "--recompute-activations", "--recompute-modules", "mlp").parallel.recomputes == "selective"
    assert load(tmp_path, "--recompute-granularity", "full").parallel.recomputes == "full"
    assert load(tmp_path).parallel.recomputes is None


def test_a_tokenizer_is_a_tokenizer_json_or_a_tiktoken_model(tmp_path: Path) -> None:
    run = load(tmp_path)
    (run.model.hf_checkpoint / "tokenizer.json").unlink()
    assert problems(run) == [f"hf-checkpoint {run.model.hf_checkpoint} has no tokenizer.json"]
    (run.model.hf_checkpoint / "tiktoken.model").touch()
    assert problems(run) == []


def test_an_empty_run_dir_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert load(tmp_path, "--run-dir", str(tmp_path / "out")).output.run_dir == tmp_path / "out"


def test_the_run_dir_of_a_run_is_taken_where_nothing_gets_mixed_up(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "versions.json").write_text("{}")
    (out / "metrics.jsonl").touch()
    words = ["--run-dir", str(out)]
    assert load(tmp_path, *words).output.run_dir == out
    (out / "metrics.jsonl").write_text("{}")
    (line,) = complaints(*complete(tmp_path), *words)
    assert "has the steps of another run; give load to resume it, or another folder" in line
    assert load(tmp_path, *words, "--load", str(tmp_path / "saved")).output.run_dir == out


@pytest.mark.parametrize(
    ("size", "updates", "expected"),
    [(None, None, (32, 1)), (8, None, (8, 4)), (None, 2, (16, 2)), (16, 2, (16, 2))],
)
def test_batch_size_and_updates_follow_from_each_other(
    size: int | None, updates: int | None, expected: tuple[int, int]
) -> None:
    rollout = RolloutConfig(num_rollout=1, rollout_batch_size=8, n_samples_per_prompt=4)
    train = TrainConfig(global_batch_size=size, num_steps_per_rollout=updates)
    assert (derived.global_batch_size(train, rollout), derived.num_steps_per_rollout(train, rollout)) == expected


@pytest.mark.parametrize(
    ("interval", "staleness", "given", "expected"),
    [(1, None, None, (1, True)), (3, None, None, (3, True)), (1, 0, None, (0, False)), (1, 0, True, (0, True))],
)
def test_staleness_and_the_ratio_have_defaults(
    interval: int, staleness: int | None, given: bool | None, expected: tuple[int, bool]
) -> None:
    rollout = RolloutConfig(
        num_rollout=1, rollout_batch_size=1, update_weights_interval=interval, max_staleness=staleness
    )
    found = derived.use_rollout_logprobs(TrainConfig(use_rollout_logprobs=given), rollout)
    assert (rollout.staleness, found) == expected


def test_with_importance_sampling_the_ratio_does_not_use_rollout_logprobs() -> None:
    rollout = RolloutConfig(num_rollout=1, rollout_batch_size=1, max_staleness=2)
    assert derived.use_rollout_logprobs(TrainConfig(), rollout)
    assert not derived.use_rollout_logprobs(TrainConfig(use_tis=True), rollout)


@pytest.mark.parametrize(
    ("estimator", "given", "expected"),
    [("grpo", None, False), ("grpo", True, True), ("reinforce_plus_plus", None, True)],
)
def test_reinforce_plus_plus_whitens(estimator: Any, given: bool | None, expected: bool) -> None:
    train = TrainConfig(advantage_estimator=estimator, normalize_advantages=given)
    assert derived.normalize_advantages(train) == expected


def test_the_reference_model_is_the_policy_s_start_unless_told(tmp_path: Path) -> None:
    run = load(tmp_path, "--use-kl-loss")
    assert derived.uses_reference(run.train)
    assert derived.ref_load(run.train, run.model) == run.model.hf_checkpoint
    assert derived.ref_load(replace(run.train, ref_load=Path("/x")), run.model) == Path("/x")
    assert not derived.uses_reference(replace(run.train, use_kl_loss=False))


def test_evaluation_samples_like_training_unless_told(tmp_path: Path) -> None:
    run = load(tmp_path, "--rollout-temperature", "0.5", "--rollout-max-response-len", "9")
    greedy = replace(run.evaluation, eval_temperature=0.0, eval_max_response_len=7)
    assert derived.eval_temperature(run.evaluation, run.rollout) == 0.5
    assert derived.eval_max_response_len(run.evaluation, run.rollout) == 9
    assert derived.eval_temperature(greedy, run.rollout) == 0.0
    assert derived.eval_max_response_len(greedy, run.rollout) == 7


def test_the_run_dir_has_name_and_time(tmp_path: Path) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5)
    assert derived.run_dir(load(tmp_path), now) == Path.cwd() / "runs/tiny-model-20260102-030405"
    assert derived.run_dir(load(tmp_path, "--run-dir", "/x"), now) == Path("/x")


def test_an_engine_may_have_data_parallel_attention(tmp_path: Path) -> None:
    run = load(tmp_path, "--sglang-dp-size", "2", "--sglang-enable-dp-attention")
    assert run.sglang == {"dp-size": "2", "enable-dp-attention": True}


def test_passed_flags_are_checked_against_the_installed_programs(tmp_path: Path) -> None:
    run = load(tmp_path, "--sglang-mem-fraction-statik", "1", "--sglang-server-concurency", "1", "--router-xyzzy")
    with pytest.raises(ConfigError) as error:
        check_passthrough(run, {"mem-fraction-static", "log-level"}, {"policy"})
    assert str(error.value).split("\n") == [
        "unknown flag --sglang-mem-fraction-statik; did you mean --sglang-mem-fraction-static?",
        "unknown flag --sglang-server-concurency; did you mean --sglang-server-concurrency?",
        "unknown flag --router-xyzzy; the installed router has no such flag",
    ]
    check_passthrough(load(tmp_path, "--sglang-log-level", "info"), {"log-level"}, set())


def test_flat_has_every_flag_by_its_name_with_underscores(tmp_path: Path) -> None:
    found = flat(load(tmp_path, "--sglang-log-level", "info"))
    assert (found["rollout_batch_size"], found["sglang_log_level"], found["lr"]) == (8, "info", 1e-6)


def test_checkpoints_go_to_and_come_from_folders(tmp_path: Path) -> None:
    words = complete(tmp_path)
    for flag in ("save", "load"):
        assert complaints(*words, f"--{flag}", str(tmp_path / "train.jsonl")) == [
            f"{flag} {tmp_path / 'train.jsonl'} is not a folder; give another path"
        ]
