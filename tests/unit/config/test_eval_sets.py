"""Sets of held-out prompts, from flags and from files."""

from pathlib import Path

import pytest

from asyncrl.config import RunConfig, load_run, missing_files, resolved
from asyncrl.config.areas.evaluation import EvalConfig
from asyncrl.config.eval_file import KEYS, REFUSED
from asyncrl.config.eval_sets import EvalSet, eval_sets, longest_request
from asyncrl.errors import ConfigError
from tests.unit.config.runs import complaints, complete, load

YAML = """
eval:
  defaults:
    max_response_len: 16384
    top_p: 0.7
  datasets:
    - name: aime
      path: aime.jsonl
      rm_type: number
      n_samples_per_eval_prompt: 16
    - name: gpqa
      path: sub/gpqa.jsonl
      top_p: 1
      temperature: 1e-1
      stop: "###"
      stop_token_ids: [7, 8]
      min_new_tokens: 3
      max_prompt_len: 100
      repetition_penalty: 1.1
      label_key: answer
      apply_chat_template: true
      no_stop_trim: true
      multimodal_keys: null
      metadata_overrides: {level: hard}
"""
TOML = """
[eval.defaults]
max_response_len = 16384
top_p = 0.7
[[eval.datasets]]
name = "aime"
path = "aime.jsonl"
rm_type = "number"
n_samples_per_eval_prompt = 16
[[eval.datasets]]
name = "gpqa"
path = "sub/gpqa.jsonl"
top_p = 1
temperature = 0.1
stop = ["###"]
stop_token_ids = [7, 8]
min_new_tokens = 3
max_prompt_len = 100
repetition_penalty = 1.1
label_key = "answer"
apply_chat_template = true
metadata_overrides = {level = "hard"}
"""


def with_file(folder: Path, text: str, *more: str, name: str = "sets.yaml") -> RunConfig:
    (folder / "sub").mkdir(exist_ok=True)
    for data in ("aime.jsonl", "sub/gpqa.jsonl", "b.jsonl"):
        (folder / data).touch()
    (folder / name).write_text(text)
    return load(folder, "--eval-interval", "2", "--eval-config", str(folder / name), *more)


def mistakes(folder: Path, text: str, *more: str, name: str = "sets.yaml") -> list[str]:
    with pytest.raises(ConfigError) as error:
        with_file(folder, text, *more, name=name)
    return str(error.value).replace(f"{folder}/", "").split("\n")


@pytest.mark.parametrize(("text", "name"), [(YAML, "sets.yaml"), (TOML, "sets.toml")])
def test_a_file_gives_each_set_its_own_settings_over_defaults_over_flags(tmp_path: Path, text: str, name: str) -> None:
    aime, gpqa = eval_sets(with_file(tmp_path, text, "--eval-temperature", "0.5", "--rollout-top-k", "20", name=name))
    assert (aime.path, gpqa.path) == (tmp_path / "aime.jsonl", tmp_path / "sub" / "gpqa.jsonl")
    assert (aime.n_samples_per_eval_prompt, gpqa.n_samples_per_eval_prompt) == (16, 1)
    assert (aime.temperature, gpqa.temperature) == (0.5, 0.1)
    assert (aime.top_p, gpqa.top_p, aime.top_k, gpqa.top_k) == (0.7, 1.0, 20, 20)
    assert (aime.max_response_len, gpqa.max_response_len) == (16384, 16384)
    assert (aime.stop, gpqa.stop, gpqa.stop_token_ids) == ((), ("###",), (7, 8))
    assert (gpqa.min_new_tokens, gpqa.max_prompt_len, gpqa.repetition_penalty) == (3, 100, 1.1)
    assert (aime.reward.rm_type, gpqa.reward.rm_type) == ("number", "exact")
    assert (aime.data.label_key, gpqa.data.label_key, gpqa.data.apply_chat_template) == ("label", "answer", True)
    assert (aime.metadata, gpqa.metadata) == ({"rm_type": "number"}, {"level": "hard"})


def test_flags_give_every_set_the_same_settings(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    data = f"--eval-prompt-data a {tmp_path}/a.jsonl b {tmp_path}/b.jsonl --eval-interval 1"
    flags = "--eval-top-p 0.7 --eval-top-k 5 --eval-min-new-tokens 2 --eval-max-prompt-len 9 --eval-input-key question"
    run = load(tmp_path, *data.split(), *flags.split(), "--eval-label-key", "answer", "--rollout-stop", "x")
    first, second = eval_sets(run)
    assert (first.name, second.name, second.path) == ("a", "b", tmp_path / "b.jsonl")
    for each in (first, second):
        assert (each.top_p, each.top_k, each.min_new_tokens, each.max_prompt_len) == (0.7, 5, 2, 9)
        assert (each.data.input_key, each.data.label_key, each.stop) == ("question", "answer", ("x",))
        assert (each.temperature, each.max_response_len) == (1.0, 1024)


def test_datasets_may_be_a_table_by_name_without_the_outer_table(tmp_path: Path) -> None:
    (only,) = eval_sets(with_file(tmp_path, "datasets:\n  aime: {path: aime.jsonl, temperature: 0}\n"))
    assert (only.name, only.temperature) == ("aime", 0.0)


def test_a_set_with_a_built_in_reward_does_not_use_the_runs_function(tmp_path: Path) -> None:
    text = "datasets:\n - {name: a, path: aime.jsonl, rm_type: number}\n - {name: b, path: b.jsonl}\n"
    first, second = eval_sets(with_file(tmp_path, text, "--custom-rm-path", "my.py:f"))
    assert (first.reward.custom_rm_path, first.reward.rm_type) == (None, "number")
    assert second.reward.custom_rm_path == f"{Path.cwd()}/my.py:f"


@pytest.mark.parametrize(
    ("flags", "key"),
    [(("--custom-rm-path", "my.py:f"), None), (("--custom-rm-path", "my.py:f", "--eval-reward-key", "acc"), "acc")],
)
def test_the_key_of_the_runs_function_is_none_of_a_built_in_rewards(
    tmp_path: Path, flags: tuple[str, ...], key: str | None
) -> None:
    text = "datasets: [{name: a, path: aime.jsonl, rm_type: dapo}]"
    (only,) = eval_sets(with_file(tmp_path, text, "--reward-key", "mine", *flags))
    assert only.reward.reward_key == key


def test_a_function_in_a_file_is_relative_to_its_folder(tmp_path: Path) -> None:
    (only,) = eval_sets(with_file(tmp_path, "datasets: [{name: a, path: aime.jsonl, custom_rm_path: 'my.py:f'}]"))
    assert only.reward.custom_rm_path == f"{tmp_path}/my.py:f"


def test_a_date_is_text_for_the_chat_template(tmp_path: Path) -> None:
    text = "datasets: [{name: a, path: aime.jsonl, apply_chat_template_kwargs: {date_string: 2024-07-26}}]"
    (only,) = eval_sets(with_file(tmp_path, text))
    assert only.data.apply_chat_template_kwargs == '{"date_string": "2024-07-26"}'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{name: a, path: aime.jsonl, top-p: 1}", "sets.yaml: a: unknown key top-p; did you mean top_p?"),
        ("{name: a, path: aime.jsonl, zzz: 1}", "sets.yaml: a: unknown key zzz; known are name, path, metadata_over"),
        ("{name: a, path: aime.jsonl, top_p: high}", 'sets.yaml: a: top_p must be a number, got "high"'),
        ("{name: a, path: aime.jsonl, top_p: none}", 'sets.yaml: a: top_p must be a number, got "none"'),
        ("{name: a, path: aime.jsonl, top_p: 1.5}", "sets.yaml: a: top_p must be above 0 and at most 1, got 1.5"),
        ("{name: a, path: aime.jsonl, top_k: 0}", "sets.yaml: a: top_k must be -1 (off) or at least 1, got 0"),
        ("{name: a, path: aime.jsonl, temperature: -1}", "sets.yaml: a: temperature must be at least 0, got -1.0"),
        (
            "{name: a, path: aime.jsonl, min_new_tokens: 2000}",
            "sets.yaml: a: min_new_tokens must be 0 to max_response_len 1024, got 2000",
        ),
        ("{name: a, path: aime.jsonl, repetition_penalty: 0}", "repetition_penalty must be above 0 and at most 2"),
        ("{name: a, path: aime.jsonl, stop: ['']}", "sets.yaml: a: stop must not contain an empty string"),
        ("{name: a, path: aime.jsonl, rm_type: numbr}", "sets.yaml: a: rm-type must be one of number, exact"),
        ("{name: a, path: aime.jsonl, metadata_overrides: 3}", "a: metadata_overrides must be a table, got 3"),
        ("{name: a, path: aime.jsonl, custom_generate_function_path: f}", "evaluations run the function of training"),
        ("{name: a, path: aime.jsonl, stop: '${oc.env:STOP}'}", "a: stop must be a plain value, got"),
        ("{name: a, path: '${HOME}/aime.jsonl'}", "a: path must be a plain value, got"),
        ("{name: a}", "sets.yaml: every set needs a name and a path, got {'name': 'a'}"),
        ("{name: a, path: nowhere.jsonl}", "sets.yaml: a nowhere.jsonl: no such file"),
        ("{name: a, path: ~nosuchuser/x}", 'sets.yaml: a: path must be a path, got "~nosuchuser/x": there is no such'),
        (r'{name: a, path: "\ud800"}', "sets.yaml: a: path must be UTF-8 text, got "),
        (r'{name: "a\nlr = 5", path: aime.jsonl}', r"the name of a set must be printable text, got 'a\nlr = 5'"),
        (
            f"{{name: a, path: aime.jsonl, top_p: {'9' * 400}}}",
            "sets.yaml: a: top_p must be a finite number, got a whole",
        ),
        (
            "{name: a, path: aime.jsonl, apply_chat_template_kwargs: {1: 2, 2024-07-26: 3}}",
            "sets.yaml: a: apply_chat_template_kwargs must have keys that are text, got {1: 2, datetime.date(",
        ),
    ],
)
def test_a_mistake_in_a_set_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    (found,) = mistakes(tmp_path, f"eval:\n  datasets:\n  - {text}\n")
    assert line in found


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "sets.yaml: must have a table eval with datasets, got None"),
        ("eval: {}", "sets.yaml: datasets must be a list of tables, each with a name and a path"),
        ("eval: {datasets: [], default: {}}", "sets.yaml: unknown key default; did you mean defaults?"),
        ("a: [", "sets.yaml:1: not YAML: "),
        ("eval: {datasets: {aime: aime.jsonl}}", "sets.yaml: datasets must be a list of tables, each with a name and"),
        ("eval: &a {datasets: *a}", "sets.yaml: nested too deeply, or a table contains itself"),
        (f"eval: {'[' * 3000}", "sets.yaml: nested too deeply, or a table contains itself"),
        ("eval: 2024-02-30", "sets.yaml: a value cannot be read: day is out of range for month"),
        ("a: 1\nb: 2\na: 3", "sets.yaml:3: the key a is given twice"),
        ("datasets:\n- {name: a, path: b.jsonl}\n- {name: a, path: b.jsonl}", "sets.yaml: two sets have the name a"),
        (
            "defaults: {topp: 1}\ndatasets: [{name: a, path: b.jsonl}]",
            "defaults: unknown key topp; did you mean top_p?",
        ),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, line: str) -> None:
    assert any(line in found for found in mistakes(tmp_path, text))


def test_every_mistake_of_a_file_is_listed(tmp_path: Path) -> None:
    text = "datasets:\n- {name: a, path: b.jsonl, top_p: x, reward_model: {}}\n- {path: b.jsonl, zzz: 1}"
    assert len(mistakes(tmp_path, text)) == 4


def test_a_file_that_is_missing_is_one_line_and_a_dry_run_lists_it(tmp_path: Path) -> None:
    argv = [*complete(tmp_path), "--eval-interval", "2", "--eval-config", str(tmp_path / "no.yaml")]
    with pytest.raises(ConfigError, match=r"eval-config .*no\.yaml: no such file"):
        load_run(argv)
    assert missing_files(load_run([*argv, "--dry-run"])) == [f"eval-config {tmp_path}/no.yaml: no such file"]


def test_a_file_with_eval_prompt_data_is_refused(tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, YAML, "--eval-prompt-data", "b", str(tmp_path / "b.jsonl"))
    assert found.startswith("eval-config sets.yaml with eval-prompt-data, whose sets would not be used; leave one of")
    assert len(eval_sets(with_file(tmp_path, YAML, "--eval-prompt-data"))) == 2


def test_the_name_of_a_set_is_printable(tmp_path: Path) -> None:
    words = ["--eval-prompt-data", "a\nlr = 5", str(tmp_path / "train.jsonl")]
    assert complaints(*complete(tmp_path), *words) == [
        r"eval-prompt-data names must be printable text, got 'a\nlr = 5'"
    ]


def test_a_set_whose_reward_needs_a_label_needs_its_key(tmp_path: Path) -> None:
    argv = [word for word in complete(tmp_path) if word not in ("--label-key", "label", "--rm-type", "exact")]
    (tmp_path / "b.jsonl").touch()
    (tmp_path / "sets.yaml").write_text("datasets: [{name: a, path: b.jsonl, rm_type: number}]")
    with pytest.raises(ConfigError) as error:
        load_run([*argv, "--custom-rm-path", "m:f", "--eval-interval", "1", "--eval-config", f"{tmp_path}/sets.yaml"])
    assert str(error.value) == (
        f"{tmp_path}/sets.yaml: a: rm-type number without label-key: the reward compares with a label; give label-key"
    )


def test_the_resolved_settings_load_as_an_equal_run(tmp_path: Path) -> None:
    run = with_file(tmp_path, YAML)
    path = tmp_path / f"{run.name}.toml"
    path.write_text(resolved(run))
    assert f'# aime: path "{tmp_path}/aime.jsonl", n_samples_per_eval_prompt 16, temperature 1.0' in path.read_text()
    assert load_run(["--config", str(path)]) == run


def test_the_longest_request_counts_each_sets_own_limits(tmp_path: Path) -> None:
    sizes = ["--rollout-max-prompt-len", "100", "--rollout-max-response-len", "50"]
    text = "datasets:\n- {name: a, path: b.jsonl, max_response_len: 70}\n"
    assert longest_request(with_file(tmp_path, text, *sizes)) == 170
    assert (
        longest_request(with_file(tmp_path, f"{text}- {{name: c, path: b.jsonl, max_prompt_len: 300}}", *sizes)) == 350
    )
    assert longest_request(with_file(tmp_path, text.replace("70", "20"), *sizes)) == 150


def test_every_flag_of_a_sampling_setting_has_a_key() -> None:
    flags = {name for name in EvalConfig.__dataclass_fields__ if name.startswith("eval_")}
    whole_run = {"eval_interval", "eval_prompt_data", "eval_config", "eval_function_path", "eval_timeout_s"}
    keys = {"eval_" + key for key in KEYS}
    assert flags - whole_run <= keys
    assert not set(KEYS) & set(REFUSED)
    own = {"name", "origin", "path", "data", "reward", "metadata"}
    in_areas = {"rm_type", "custom_rm_path", "reward_key", "metadata_key", "input_key", "label_key", "tool_key"}
    in_areas |= {"apply_chat_template", "apply_chat_template_kwargs"}
    assert set(EvalSet.__dataclass_fields__) - own == set(KEYS) - in_areas


def test_a_set_has_the_reward_key_of_the_file_over_the_evaluations_over_the_runs(tmp_path: Path) -> None:
    text = "datasets:\n- {name: a, path: b.jsonl}\n- {name: c, path: b.jsonl, reward_key: acc}\n"
    plain, own = eval_sets(with_file(tmp_path, text, "--reward-key", "score"))
    assert (plain.reward.reward_key, own.reward.reward_key) == ("score", "acc")
    plain, own = eval_sets(with_file(tmp_path, text, "--reward-key", "score", "--eval-reward-key", "pass"))
    assert (plain.reward.reward_key, own.reward.reward_key) == ("pass", "acc")


def test_a_sets_prompts_do_not_have_the_length_limit_of_training(tmp_path: Path) -> None:
    (only,) = eval_sets(with_file(tmp_path, "datasets: {a: {path: b.jsonl}}", "--rollout-max-prompt-len", "5"))
    assert (only.max_prompt_len, only.data.rollout_max_prompt_len) == (None, None)
