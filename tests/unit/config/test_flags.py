import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config.command_line import parser
from asyncrl.config.knobs import knobs
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
