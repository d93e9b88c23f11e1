"""The YAML file of --custom-config-path."""

from pathlib import Path

import pytest

from asyncrl.config import flat
from tests.unit.config.runs import complaints, complete, load


def custom(folder: Path, text: str) -> list[str]:
    path = folder / "custom.yaml"
    path.write_text(text)
    return ["--custom-config-path", str(path)]


def test_a_key_that_is_a_setting_replaces_even_a_flag(tmp_path: Path) -> None:
    words = custom(tmp_path, "lr: 1e-5\neps_clip: 0.3\nprompt-key: question\nrollout_stop: [a, b]\nuse_kl_loss: true\n")
    run = load(tmp_path, "--lr", "1", "--eps-clip", "0.1", *words)
    assert (run.train.lr, run.train.eps_clip, run.train.use_kl_loss) == (1e-5, 0.3, True)
    assert (run.data.input_key, run.rollout.rollout_stop) == ("question", ("a", "b"))
    assert run.attributes == {}


def test_any_other_key_is_an_attribute_of_args(tmp_path: Path) -> None:
    run = load(tmp_path, *custom(tmp_path, "max_search_turns: 3\nsearch: {url: 'http://here', topk: 5}\n"))
    assert run.attributes == {"max_search_turns": 3, "search": {"url": "http://here", "topk": 5}}
    assert flat(run)["max_search_turns"] == 3
    assert run.notes == ()


def test_flags_that_are_accepted_or_passed_on_may_be_keys(tmp_path: Path) -> None:
    run = load(
        tmp_path, *custom(tmp_path, "optimizer: adam\nsglang_mem_fraction_static: 0.8\nuse-fault-tolerance: true\n")
    )
    assert run.foreign == {"optimizer": "adam", "use-fault-tolerance": True}
    assert run.sglang == {"mem-fraction-static": "0.8"}


def test_a_key_that_is_not_here_is_an_attribute_with_a_note(tmp_path: Path) -> None:
    run = load(tmp_path, *custom(tmp_path, "loss_mask_type: qwen\n"))
    assert run.attributes == {"loss_mask_type": "qwen"}
    assert run.notes == (
        "loss_mask_type of custom-config-path is an attribute of args, and otherwise has no effect: name the type in "
        "your function: MultiTurnLossMaskGenerator(tokenizer, tokenizer_type)",
    )


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, *custom(tmp_path, "# nothing\n")).attributes == {}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lr: small\n", ': lr must be a number, got "small"'),
        ("eval_interval: none\n", ': eval_interval must be a whole number, got "none"'),
        ("use_kl_loss: 1\n", ": use_kl_loss must be true or false, got 1"),
        ("- a\n", ": must be one mapping whose keys are names"),
        ("1: a\n", ": must be one mapping whose keys are names"),
        ("a: [1\n", ": not YAML: while parsing a flow sequence"),
        ("x: 2024-02-30\n", ": a value cannot be read: day is out of range for month"),
        ("x: !!int abc\n", ": a value cannot be read: invalid literal for int() with base 10: 'abc'"),
        ("x: !!bool maybe\n", ": a value cannot be read: 'maybe'"),
        ("x: !!timestamp soon\n", ": a value cannot be read: "),
        (f"x: {'[' * 3000}\n", ": nested too deeply, or a table contains itself"),
        ("lr: &a [*a]\n", ": lr: nested too deeply, or a table contains itself"),
        (f"lr: {'9' * 400}\n", ": lr must be a finite number, got a whole number of more than 308 digits"),
        ('rollout_stop: ["\\udcff"]\n', ": rollout_stop must be UTF-8 text, got '\\udcff'"),
        ('sglang_x: "\\udcff"\n', ": sglang_x must be UTF-8 text, got '\\udcff'"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    words = custom(tmp_path, text)
    (mistake,) = complaints(*complete(tmp_path), *words)
    assert mistake.startswith(f"custom-config-path {words[1]}{line}")


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.yaml"
    assert complaints(*complete(tmp_path), "--custom-config-path", str(path)) == [
        f"custom-config-path {path}: no such file"
    ]
