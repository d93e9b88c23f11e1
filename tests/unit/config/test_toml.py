import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import load_run, resolved
from asyncrl.config.knobs import knobs
from asyncrl.errors import ConfigError
from tests.unit.config.runs import complaints, complete, load


def file(folder: Path, text: str) -> Path:
    complete(folder)
    path = folder / "quick.toml"
    path.write_text(text)
    return path


REQUIRED = """
hf-checkpoint = "tiny-model"
prompt-data = "train.jsonl"
num-rollout = 3
rollout-batch-size = 8
n-samples-per-prompt = 4
rm-type = "exact"
label-key = "label"
"""


def test_a_file_alone_is_a_run_and_its_paths_start_at_its_folder(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").touch()
    more = 'eval-prompt-data = ["held", "held.jsonl"]\ncustom-rm-path = "my.py:f"\nlr = 1\nrollout-stop = ["a"]\n'
    run = load_run(["--config", str(file(tmp_path, REQUIRED + more))])
    assert run.name == "quick"
    assert run.model.hf_checkpoint == tmp_path / "tiny-model"
    assert run.evaluation.data_sets == (("held", tmp_path / "held.jsonl"),)
    assert run.reward.custom_rm_path == f"{tmp_path}/my.py:f"
    assert (run.train.lr, run.rollout.rollout_stop) == (1.0, ("a",))


FUNCTIONS = [knob.name for knob in knobs().values() if "notation of --dynamic-sampling" in knob.help]


@pytest.mark.parametrize("name", ["dynamic-sampling-filter-path", *FUNCTIONS])
def test_the_file_of_every_user_function_starts_at_the_folder_of_the_toml_file(tmp_path: Path, name: str) -> None:
    run = load_run(["--config", str(file(tmp_path, f'{REQUIRED}{name} = "my.py:f"\n')), "--dry-run", "--use-tis"])
    knob = knobs()[name]
    assert getattr(getattr(run, knob.area), knob.field) == f"{tmp_path}/my.py:f"


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    more = 'prompt-key = "q"\nsglang-mem-fraction-static = 0.5\nsglang-enable-metrics = true\nrouter-x = false\n'
    path = file(tmp_path, REQUIRED + more)
    run = load_run(["--config", str(path), "--num-rollout", "9", "--input-key", "p", "--sglang-mem-fraction-static=1"])
    assert (run.rollout.num_rollout, run.data.input_key) == (9, "p")
    assert run.sglang == {"mem-fraction-static": "1", "enable-metrics": True}
    assert run.router == {}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('rollout-batch-size = "x"', ': rollout-batch-size must be a whole number, got "x"'),
        ("rollout-batch-size = 1.0", ": rollout-batch-size must be a whole number, got 1.0"),
        ("rollout-batch-size = true", ": rollout-batch-size must be a whole number, got true"),
        ("lr = true", ": lr must be a number, got true"),
        ("lr = inf", ": lr must be a finite number, got inf"),
        ("rollout-shuffle = 1", ": rollout-shuffle must be true or false, got 1"),
        ('rollout-stop = "a"', ': rollout-stop must be a list, got "a"'),
        ("rollout-stop = [1]", ": rollout-stop must be text, got 1"),
        ("prompt-data = 3", ": prompt-data must be a path, got 3"),
        ('prompt-data = ""', ": prompt-data must be a path, got an empty text"),
        ('stale-policy = "x"', ': stale-policy must be one of wait, mask, drop, got "x"'),
        ("global-batch = 4", ": unknown key global-batch; did you mean global-batch-size?"),
        ("xyzzy = 4", ": unknown key xyzzy"),
        ("rollout-batchsize = 4", ": unknown key rollout-batchsize; did you mean rollout-batch-size?"),
        ("rollout_batch_size = 4", ": unknown key rollout_batch_size; did you mean rollout-batch-size?"),
        (
            'input-key = "a"\nprompt-key = "b"',
            ": prompt-key: the setting input-key is given under two names; leave one of them out",
        ),
        ("[rollout]\nlr = 1", ": [rollout] is a table; write its keys at the top level, named like the flags"),
        ("[sglang-x]\ny = 1", ": sglang-x must be text, a number, true, or a list of these, got {'y': 1}"),
        ("lr = 1\nnum-rollout = = 3", ":2: not TOML: Invalid value, column 15"),
        ("lr = 1\nlr = 2\n", ":2: not TOML: a key is given twice, column 7"),
        ('input-key = "a', ": not TOML: Unterminated string (at end of document)"),
        (f"lr = {'9' * 400}", ": lr must be a finite number, got a whole number of more than 308 digits"),
        (
            f"lr = {'9' * 5000}",
            ": a value cannot be read: Exceeds the limit (4300 digits) for integer string conversion: "
            "value has 5000 digits; use sys.set_int_max_str_digits() to increase the limit",
        ),
        (f"num-rollout = {2**63}", ": num-rollout must be below 2**63 in size"),
        (f"lr = {'[' * 5000}", ": nested too deeply, or a table contains itself"),
        ('save = "~nosuchuser/x"', ': save must be a path, got "~nosuchuser/x": there is no such user'),
        ('save = "a\\u0000b"', ': save must be a path, got "a\\u0000b", which contains a null character'),
        (f'save = "{"a" * 300}"', ": save is too long: a name in it has at most 255 bytes, got 300"),
        (f'save = "{"a/" * 3000}"', ": save is too long: a path has at most 4095 bytes, got "),
    ],
)
def test_a_wrong_file_is_one_line_with_its_name(tmp_path: Path, text: str, line: str) -> None:
    path = file(tmp_path, text)
    (found,) = complaints("--config", str(path))
    assert found == f"{path}{line}" or (line.endswith("got ") and found.startswith(f"{path}{line}"))


def test_none_takes_back_a_number_that_has_no_default(tmp_path: Path) -> None:
    path = file(
        tmp_path, f'{REQUIRED}eval-interval = 2\neval-prompt-data = ["sums", "train.jsonl"]\neval-top-p = 0.5\n'
    )
    on = load_run(["--config", str(path)]).evaluation
    assert (on.eval_interval, on.eval_top_p) == (2, 0.5)
    off = load_run(["--config", str(path), "--eval-interval", "none", "--eval-top-p", "none", "--eval-prompt-data"])
    assert (off.evaluation.eval_interval, off.evaluation.eval_top_p, off.evaluation.eval_prompt_data) == (
        None,
        None,
        (),
    )
    assert complaints("--config", str(path), "--eval-prompt-data") == [
        "eval-interval 2 without eval-prompt-data; give NAME PATH pairs of held-out prompts, or eval-config, or "
        "--eval-interval none for no evaluation"
    ]


def test_a_number_that_is_taken_back_may_be_implied(tmp_path: Path) -> None:
    path = file(tmp_path, f"{REQUIRED}max-staleness = 2\n")
    run = load_run(["--config", str(path), "--max-staleness", "none"], program="train.py")
    assert run.rollout.max_staleness == 0


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"lr = \xff")
    assert complaints("--config", str(path)) == [f"{path}: not UTF-8 text; save it as UTF-8"]


def test_the_resolved_text_names_what_was_derived(tmp_path: Path) -> None:
    text = resolved(load(tmp_path, "--num-steps-per-rollout", "2", "--rollout-temperature", "0.7"))
    for line in ("# global-batch-size = 16", "# eval-temperature = 0.7", "# max-staleness = 1", "lr = 1e-06"):
        assert f"\n{line}\n" in text
    assert "None" not in text


def test_false_on_the_command_line_takes_a_flag_that_is_passed_on_out_of_the_file(tmp_path: Path) -> None:
    more = "sglang-disable-radix-cache = true\nrouter-x = true\nsglang-enable-metrics = false\n"
    path = file(tmp_path, REQUIRED + more)
    words = ["--sglang-disable-radix-cache", "false", "--router-x=False", "--sglang-enable-metrics"]
    run = load_run(["--config", str(path), *words])
    assert (run.sglang, run.router) == ({"enable-metrics": True}, {})


words = st.text(min_size=1).filter(lambda text: not text.startswith("-"))


@settings(max_examples=25, deadline=None)
@given(
    lr=st.floats(1e-12, 1e3),
    stops=st.lists(words, max_size=3),
    key=words,
    staleness=st.none() | st.integers(0, 9),
    flag=st.booleans(),
    passed=words,
)
def test_resolved_text_gives_the_same_run(
    lr: float, stops: list[str], key: str, staleness: int | None, flag: bool, passed: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        more = ["--lr", repr(lr), "--input-key", key, "--sglang-chat-template", passed, "--sglang-enable-metrics"]
        more += ["--rollout-stop", *stops, "--rollout-shuffle" if flag else "--no-timeline"]
        more += [] if staleness is None else ["--max-staleness", str(staleness)]
        run = load(folder, *more)
        again = folder / f"{run.name}.toml"
        again.write_text(resolved(run), encoding="utf-8", newline="")
        assert load_run(["--config", str(again)]) == run


def test_resolved_text_has_the_flags_that_are_no_settings(tmp_path: Path) -> None:
    custom = tmp_path / "custom.yaml"
    custom.write_text("lr: 1e-3\nmax_calls: 3\n")
    words = "--optimizer adam --swiglu --spec a.b c --bf16 --sglang-cuda-graph-bs 1 2 --colocate --rollout-num-gpus 4"
    run = load_run([*complete(tmp_path), *words.split(), "--custom-config-path", str(custom)], program="train.py")
    again = tmp_path / f"{run.name}.toml"
    again.write_text(resolved(run))
    assert load_run(["--config", str(again)]) == run
    assert (run.train.lr, run.attributes) == (1e-3, {"max_calls": 3})


def test_lists_of_flags_that_are_passed_on_are_lists_in_the_file(tmp_path: Path) -> None:
    more = 'sglang-cuda-graph-bs = [1, 2, 4]\nrouter-request-id-headers = ["x-a"]\n'
    run = load_run(["--config", str(file(tmp_path, REQUIRED + more))])
    assert run.sglang == {"cuda-graph-bs": ("1", "2", "4")}
    assert run.router == {"request-id-headers": "x-a"}


def test_errors_are_config_errors_and_pickle() -> None:
    import pickle

    with pytest.raises(ConfigError) as error:
        load_run(["--x"])
    assert str(pickle.loads(pickle.dumps(error.value))) == "unknown flag --x"
