"""The report of a rehearsed script; the rehearsal itself takes GPUs, or minutes."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from asyncrl.data.tokenizer import load_tokenizer
from benchmarks.common import random_reward
from benchmarks.common.background_run import BackgroundRun, command_line
from benchmarks.rehearse.__main__ import COLUMNS, main, report
from benchmarks.sync_vs_async.workload import write_shape
from tests.declared_metrics import is_declared
from tests.unit.metrics.made import group, scored

MODELS = Path(__file__).parents[1] / "launch" / "models"


def test_each_column_is_a_metric() -> None:
    assert all(is_declared(name) for name in COLUMNS if name != "step")


def test_a_step_is_a_line_and_what_it_lacks_an_empty_cell() -> None:
    lines = report([{"step": 0, "time/step_s": 1.25, "tokens/trained": 12_345}], "it fits\n", ["10 MiB", "20 MiB"])
    assert len({line.count("|") for line in lines[:3]}) == 1
    assert lines[2].startswith("| 0 | 1.2 |  |  | 12,345 |")
    assert lines[3:] == ["", "- memory of the GPUs at the end: 10 MiB, 20 MiB", "", "```", "it fits", "```"]


def test_a_missing_script_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none.sh"), "--config", str(MODELS / "qwen3-4b" / "config.json")])
    assert "none.sh: no such file" in capsys.readouterr().err


def test_a_folder_with_another_model_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").touch()
    given = ["configs/qwen3-4b.sh", "--config", str(MODELS / "qwen3-4b" / "config.json")]
    with pytest.raises(SystemExit, match="does not hold a whole model"):
        main([*given, "--device", "cpu", "--checkpoint", str(tmp_path), "--out", str(tmp_path / "out")])


def test_flags_without_a_value_stand_alone() -> None:
    on_cpu = command_line({"lr": 1e-6}, device="cpu", use_router=True)
    assert on_cpu == ["--device", "cpu", "--lr", "1e-06"]
    on_gpus = command_line({"lr": 1e-6}, device="cuda", use_router=False)
    assert on_gpus[:5] == ["--device", "cuda", "--no-use-router", "--lr", "1e-06"]
    at = on_gpus.index("--sglang-disable-prefill-cuda-graph")
    assert on_gpus[at + 1].startswith("--sglang-")
    assert on_gpus[on_gpus.index("--sglang-attention-backend") + 1] == "triton"


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(SystemExit, match="is of another run"):
        BackgroundRun(["true"], tmp_path, 1.0, {})


@pytest.mark.parametrize("name", ["qwen3-4b", "glm-z1-9b", "qwen3-30b-a3b"])
def test_weights_of_any_shape_are_written_with_a_tokenizer_that_chats(tmp_path: Path, name: str) -> None:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 512}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 32, "num_experts": 4}
    config = json.loads((MODELS / name / "config.json").read_text())
    given = tmp_path / "given" / "config.json"
    given.parent.mkdir()
    given.write_text(json.dumps(config | {key: value for key, value in small.items() if key in config}))
    write_shape(tmp_path / "model", given, "cpu")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "model").num_hidden_layers == 2
    assert load_tokenizer(tmp_path / "model").render([{"role": "user", "content": "abc"}]) == "abc"
    assert list((tmp_path / "model").glob("*.safetensors"))


def test_rewards_are_by_chance_and_the_same_for_the_same_answer() -> None:
    def reward_of(text: str) -> float:
        answer = replace(scored(0, 0.0, (1,), (0, 0, 1)).sample, text=text)
        return asyncio.run(random_reward.reward(group(0).prompt, answer))

    found = [reward_of(str(number)) for number in range(100)]
    assert found == [reward_of(str(number)) for number in range(100)]
    assert 30 < sum(found) < 70
