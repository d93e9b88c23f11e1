"""Sets of held-out prompts that are read and checked before a run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.app.checks import check
from asyncrl.app.evaluation import eval_sampling
from asyncrl.config import RunConfig, load_run
from asyncrl.errors import ConfigError, DataError, PluginError
from asyncrl.types import SamplingParams

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"


def run_with(folder: Path, sets: str, *flags: str) -> RunConfig:
    """Return the quickstart with the sets of a file, whose prompts are short and long."""
    texts = ("1+1=", "1+1=" * 40, "2+2=")
    rows = [{"prompt": text, "label": "2", "about": {"a": 0, "b": 2}} for text in texts]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "sets.yaml").write_text(f"datasets:\n{sets}")
    config = folder / "run.toml"
    text = QUICKSTART.read_text().replace('"quickstart/', f'"{QUICKSTART.parent}/quickstart/')
    config.write_text("\n".join(line for line in text.splitlines() if not line.startswith("eval-prompt-data")))
    return load_run(["--config", str(config), "--eval-config", str(folder / "sets.yaml"), *flags])


def complaint(folder: Path, sets: str, *flags: str) -> str:
    with pytest.raises(ConfigError) as error:
        check(run_with(folder, sets, *flags))
    return str(error.value).replace(f"{folder}/", "")


def test_each_set_has_its_prompts_settings_and_reward(tmp_path: Path) -> None:
    short, boxed = check(
        run_with(
            tmp_path,
            "- {name: short, path: rows.jsonl, max_prompt_len: 20, max_response_len: 30,\n"
            "   metadata_key: about, metadata_overrides: {a: 1}}\n"
            "- {name: boxed, path: rows.jsonl, rm_type: math, stop_token_ids: [9], min_new_tokens: 4, top_k: 3}\n",
        )
    ).held_out
    assert [prompt.row for prompt in short.prompts] == [0, 2]
    assert [prompt.row for prompt in boxed.prompts] == [0, 1, 2]
    assert [dict(prompt.metadata) for prompt in short.prompts] == [{"a": 1, "b": 2}] * 2
    assert boxed.prompts[0].metadata == {"rm_type": "math"}
    assert short.reward is not boxed.reward
    assert [each.tokenizer.decode((9, 1)) for each in (short, boxed)] == ["7", "7<end>"]
    assert eval_sampling(boxed.settings, (1,)) == SamplingParams(
        temperature=1.0, top_p=1.0, top_k=3, max_new_tokens=64, stop_token_ids=(1, 9), min_new_tokens=4
    )
    assert eval_sampling(short.settings, (1,)).max_new_tokens == 30


def test_a_set_may_be_longer_than_training_but_not_than_the_model(tmp_path: Path) -> None:
    check(run_with(tmp_path, "- {name: a, path: rows.jsonl, max_prompt_len: 20, max_response_len: 200}\n"))
    assert complaint(tmp_path, "- {name: a, path: rows.jsonl, max_response_len: 300}\n") == (
        "sets.yaml: a: max_response_len 300 tokens, the model has 256 positions (max-position-embeddings), and a "
        "prompt must have room as well"
    )
    assert complaint(tmp_path, "- {name: a, path: rows.jsonl, max_prompt_len: 100, max_response_len: 200}\n") == (
        "prompts of up to 100 + sets.yaml: a: max_response_len 200 = 300 tokens, the model has 256 positions "
        "(max-position-embeddings)"
    )


def test_a_missing_key_names_the_setting_of_held_out_rows(tmp_path: Path) -> None:
    run = run_with(tmp_path, "- {name: a, path: rows.jsonl}\n")
    file = tmp_path / "aime.jsonl"
    for row, of_flags, of_file in (
        (
            {"problem": "1+1=", "label": "2"},
            "did you mean --eval-input-key problem?",
            "did you mean input_key problem?",
        ),
        ({"prompt": "1+1=", "labels": "2"}, "did you mean --eval-label-key labels?", "did you mean label_key labels?"),
        ({"prompt": "1+1=", "answer": "2"}, "--eval-label-key names the key", "label_key names the key"),
    ):
        file.write_text(json.dumps(row))
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        missing = "label" if "prompt" in row else "prompt"
        line = f'1: key "{missing}" is missing; the row has: {", ".join(row)}; '
        flags = replace(run.evaluation, eval_config=None, eval_prompt_data=("aime", str(file)))
        with pytest.raises(DataError) as error:
            check(replace(run, evaluation=flags, eval_entries=()))
        assert str(error.value) == f"{file}:{line}{of_flags}"
        with pytest.raises(DataError) as error:
            check(run)
        assert str(error.value) == f"{tmp_path}/rows.jsonl:{line}{of_file}"


def test_a_held_out_prompt_without_room_for_its_response_is_named(tmp_path: Path) -> None:
    assert complaint(tmp_path, "- {name: a, path: rows.jsonl, max_response_len: 200}\n") == (
        "sets.yaml: a: the prompt of row 1 has 160 tokens, with max_response_len 200 that is 360; the model has 256 "
        "positions (max-position-embeddings); give eval-max-prompt-len"
    )


def test_a_limit_that_leaves_no_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a: no prompt of .*rows.jsonl has at most max_prompt_len 1 tokens"):
        check(run_with(tmp_path, "- {name: a, path: rows.jsonl, max_prompt_len: 1}\n"))


def test_a_minimum_length_needs_the_tokenizers_end_token(tmp_path: Path) -> None:
    sets = "- {name: a, path: rows.jsonl, max_prompt_len: 20, min_new_tokens: 2}\n"
    check(run_with(tmp_path, sets))
    model = tmp_path / "model"
    shutil.copytree(QUICKSTART.parent / "quickstart" / "model", model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    assert complaint(tmp_path, sets, "--hf-checkpoint", str(model)) == (
        "sets.yaml: a: min_new_tokens 2: SGLang needs the eos_token in the checkpoint's tokenizer_config.json, which "
        "has none; leave it out"
    )
    (model / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    check(run_with(tmp_path, sets, "--hf-checkpoint", str(model)))


def test_a_reward_of_a_set_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="--custom-rm-path 'no_such_module:f'"):
        check(
            run_with(
                tmp_path, "- {name: a, path: rows.jsonl, max_prompt_len: 20, custom_rm_path: 'no_such_module:f'}\n"
            )
        )


def test_a_key_of_a_set_is_used_for_its_rows_only(tmp_path: Path) -> None:
    assert 'rows.jsonl:1: key "question" is missing' in complaint(
        tmp_path, "- {name: a, path: rows.jsonl, input_key: question}\n"
    )
