import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config import load_run
from asyncrl.config.command_line import parser
from asyncrl.config.derived import use_dynamic_batch_size
from asyncrl.config.knobs import knobs
from asyncrl.errors import ConfigError
from tests.unit.config.runs import complaints, complete, load


def test_every_setting_has_a_flag() -> None:
    text = parser().format_help()
    for knob in knobs().values():
        assert f"--{knob.name}" in text


def test_every_field_has_a_help_text_of_whole_sentences() -> None:
    assert [name for name, knob in knobs().items() if not knob.help.endswith(".")] == []


def test_help_and_import_need_neither_torch_nor_numpy() -> None:
    code = "import asyncrl.config, sys; asyncrl.config.load_run(['--help'])"
    imported = "import atexit, sys; atexit.register(lambda: print(sorted({'torch', 'numpy'} & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", f"{imported}\n{code}"], capture_output=True, text=True, check=True)
    assert "The nodes and GPUs of trainer and engines:\n" in done.stdout
    assert "(default: 1e-06)" in done.stdout
    assert done.stdout.endswith("[]\n")


def test_flags_have_the_types_of_their_fields(tmp_path: Path) -> None:
    words = "--lr 2e-5 --max-staleness 2 --no-use-router --rollout-shuffle --rollout-stop a b --dtype float32"
    run = load(tmp_path, *words.split(), "--rollout-stop-token-ids", "3", "5", "--rollout-top-k", "-1")
    assert (run.train.lr, run.rollout.max_staleness, run.cluster.use_router) == (2e-5, 2, False)
    assert (run.data.rollout_shuffle, run.rollout.rollout_stop, run.model.dtype) == (True, ("a", "b"), "float32")
    assert run.rollout.rollout_stop_token_ids == (3, 5)
    assert run.train.use_rollout_logprobs is None
    assert run.name == "tiny-model"


def test_prompt_key_is_another_name_of_input_key(tmp_path: Path) -> None:
    assert load(tmp_path, "--prompt-key", "question").data.input_key == "question"


def test_relative_paths_of_flags_start_at_the_working_directory(tmp_path: Path) -> None:
    words = ["--run-dir", "out", "--custom-rm-path", "my/rewards.py:f", "--dynamic-sampling-filter-path", "a.b:c"]
    run = load(tmp_path, *words)
    assert run.output.run_dir == Path.cwd() / "out"
    assert run.reward.custom_rm_path == f"{Path.cwd()}/my/rewards.py:f"
    assert run.rollout.dynamic_sampling_filter_path == "a.b:c"


def test_a_reward_may_be_a_file_alone_under_another_name_of_the_flag(tmp_path: Path) -> None:
    assert load(tmp_path, "--reward-fn-path", "mine.py").reward.custom_rm_path == f"{Path.cwd()}/mine.py"


def test_other_programs_flags_pass_through_except_our_own(tmp_path: Path) -> None:
    words = "--sglang-mem-fraction-static 0.8 --sglang-enable-metrics --router-policy=round_robin"
    run = load(tmp_path, *words.split(), "--sglang-server-concurrency", "7")
    assert run.sglang == {"mem-fraction-static": "0.8", "enable-metrics": True}
    assert run.router == {"policy": "round_robin"}
    assert run.rollout.sglang_server_concurrency == 7


def test_reward_fn_path_is_another_name_of_custom_rm_path(tmp_path: Path) -> None:
    assert load(tmp_path, "--reward-fn-path", "a.b").reward.custom_rm_path == "a.b"


def test_a_repeated_flag_adds_to_a_list(tmp_path: Path) -> None:
    words = ["--eval-prompt-data", "aime", "a.jsonl", "--eval-prompt-data", "gsm8k", "b.jsonl"]
    run = load(tmp_path, *words, "--rollout-stop", "x", "--lr", "1", "--rollout-stop", "y", "z", "--dry-run")
    assert [name for name, _ in run.evaluation.data_sets] == ["aime", "gsm8k"]
    assert run.rollout.rollout_stop == ("x", "y", "z")


def test_every_list_is_added_to() -> None:
    lists = {knob.name for knob in knobs().values() if knob.is_many}
    extending = {action.dest for action in parser()._actions if type(action).__name__ == "_ExtendAction"}  # noqa: SLF001
    assert lists
    assert extending == lists - {"prompt-data"}


def test_the_last_prompt_data_counts_as_in_slime(tmp_path: Path) -> None:
    run = load(tmp_path, "--prompt-data", "first.jsonl", "--prompt-data", "last.jsonl", "--dry-run")
    assert "last.jsonl" in str(run.data.prompt_data)
    assert "first.jsonl" not in str(run.data.prompt_data)


def test_flags_that_are_passed_on_may_have_several_words(tmp_path: Path) -> None:
    words = "--sglang-cuda-graph-bs 1 2 4 8 --sglang-enable-metrics true --sglang-enable-mixed-chunk false "
    words += "--router-request-id-headers x-a x-b --sglang-schedule-conservativeness 0.3"
    run = load(tmp_path, *words.split())
    assert run.sglang == {
        "cuda-graph-bs": ("1", "2", "4", "8"),
        "enable-metrics": True,
        "schedule-conservativeness": "0.3",
    }
    assert run.router == {"request-id-headers": ("x-a", "x-b")}


def test_colocate_implies_synchronous_training_and_leaves_the_engines_gpus_to_the_trainer(tmp_path: Path) -> None:
    words = "--colocate --actor-num-gpus-per-node 8 --rollout-num-gpus 4"
    run = load(tmp_path, *words.split())
    assert (run.rollout.max_staleness, run.cluster.num_rollout_gpus) == (0, 8)
    assert run.notes == (
        "colocate implies max-staleness 0: generation and training alternate",
        "rollout-num-gpus 4 has no effect: with colocate the engines have the trainer's 8 GPUs",
    )
    assert load(tmp_path, "--colocate", "--max-staleness", "0").notes == ()


def test_partial_rollouts_without_staleness_train_only_new_tokens_and_a_note_says_so(tmp_path: Path) -> None:
    (note,) = load(tmp_path, "--partial-rollout", "--max-staleness", "0").notes
    assert note.startswith("partial-rollout has little effect with max-staleness 0: ")
    assert load(tmp_path, "--partial-rollout", "--max-staleness", "1").notes == ()


def test_micro_batches_filled_by_tokens_ignore_their_number_of_samples_with_a_note(tmp_path: Path) -> None:
    words = "--micro-batch-size 1 --use-dynamic-batch-size --max-tokens-per-gpu 4608"
    run = load(tmp_path, *words.split())
    assert use_dynamic_batch_size(run.train)
    assert run.notes == (
        "micro-batch-size 1 has no effect: use-dynamic-batch-size fills microbatches up to max-tokens-per-gpu 4608",
    )
    assert load(tmp_path, "--micro-batch-size", "1").notes == ()


def test_the_activation_of_experts_has_nothing_to_recompute_and_a_note_says_so(tmp_path: Path) -> None:
    words = "--recompute-granularity selective --recompute-modules"
    (note,) = load(tmp_path, *words.split(), "core_attn", "moe_act").notes
    assert note.startswith("recompute-modules moe_act has no effect: ")
    assert load(tmp_path, *words.split(), "core_attn").notes == ()


def test_the_buffer_is_counted_in_batches(tmp_path: Path) -> None:
    words = ["--rollout-batch-size", "32", "--async-buffer-size", "4"]
    assert load(tmp_path, *words).rollout.buffer_groups == 128
    assert load(tmp_path).rollout.buffer_groups is None


def test_train_py_is_synchronous(tmp_path: Path) -> None:
    run = load_run(complete(tmp_path), program="train.py")
    assert run.rollout.staleness == 0
    assert run.notes == ("train.py implies max-staleness 0: generation and training alternate",)
    assert load_run([*complete(tmp_path), "--max-staleness", "0"], program="train.py").notes == ()
    with pytest.raises(ConfigError, match=r"^max-staleness 2 with train\.py, .* start train_async\.py instead$"):
        load_run([*complete(tmp_path), "--max-staleness", "2"], program="train.py")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--rollout-batchsize 4", "unknown flag --rollout-batchsize; did you mean --rollout-batch-size?"),
        ("--rollout_batch_size=4", "unknown flag --rollout_batch_size; did you mean --rollout-batch-size?"),
        ("--rollout-topk -1", "unknown flag --rollout-topk; did you mean --rollout-top-k?"),
        ("--no-use-routr", "unknown flag --no-use-routr; did you mean --no-use-router?"),
        ("--num-roll 4", "unknown flag --num-roll; did you mean --num-rollout?"),
        ("--xyzzy 4", "unknown flag --xyzzy"),
        ("-x", "unknown flag -x"),
        (
            "run.toml",
            'unexpected word "run.toml": every setting is a flag; put --config or a flag\'s name before it',
        ),
        ("--num-rollout many", '--num-rollout must be a whole number, got "many"'),
        ("--num-rollout none", '--num-rollout must be a whole number, got "none"'),
        ("--num-rollout 1.5", '--num-rollout must be a whole number, got "1.5"'),
        ("--lr small", '--lr must be a number, got "small"'),
        ("--lr nan", "--lr must be a finite number, got nan"),
        ("--dtype float16", '--dtype must be one of auto, float32, bfloat16, got "float16"'),
        ("--rollout-stop-token-ids 1 x", '--rollout-stop-token-ids must be a whole number, got "x"'),
        ("--num-rollout", "--num-rollout: expected one argument"),
        ("--sglang-tp-size 2", "--sglang-tp-size cannot be given: use --rollout-num-gpus-per-engine"),
        (
            "--sglang-dp-size 2",
            "--sglang-dp-size without --sglang-enable-dp-attention: an engine runs on one node; use --rollout-num-gpus "
            "and --rollout-num-gpus-per-engine",
        ),
        ("--sglang-model-path x", "--sglang-model-path cannot be given: use --hf-checkpoint"),
        ("--sglang-device cpu", "--sglang-device cannot be given: use --device"),
        ("--router-port 1", "--router-port cannot be given: asyncrl sets it when it starts the servers"),
        ("--config nowhere.toml", "--config nowhere.toml: no such file"),
        ("--config /", "--config /: Is a directory"),
        ("--config ~nosuchuser/run.toml", "--config ~nosuchuser/run.toml: no such file"),
        ("--save ~nosuchuser/x", '--save must be a path, got "~nosuchuser/x": there is no such user'),
        (
            "--custom-rm-path ~nosuchuser/x.py:f",
            '--custom-rm-path must be a path, got "~nosuchuser/x": there is no such user',
        ),
        (f"--num-rollout {2**63}", "--num-rollout must be below 2**63 in size"),
        ("--rollout-stop \udcff", r"an argument must be UTF-8 text, got '\udcff'"),
        ("--sglang-x=\udcff", r"an argument must be UTF-8 text, got '--sglang-x=\udcff'"),
    ],
)
def test_a_wrong_flag_is_one_line(words: str, line: str) -> None:
    assert complaints(*words.split()) == [line]


def test_all_mistakes_are_reported_at_once() -> None:
    assert complaints("--lrr", "1", "--lr", "x", "--sglang-port", "1") == [
        "unknown flag --lrr; did you mean --lr?",
        '--lr must be a number, got "x"',
        "--sglang-port cannot be given: asyncrl sets it when it starts the servers",
    ]


def test_missing_required_flags_are_named_with_their_help(tmp_path: Path) -> None:
    assert complaints(*complete(tmp_path)[2:]) == [
        "--num-rollout is missing: Number of training steps in the run (slime's name: one rollout batch per step)."
    ]
    assert len(complaints()) == 4
