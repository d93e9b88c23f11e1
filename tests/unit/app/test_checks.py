"""Settings that are refused before anything expensive starts, and the flags that servers get."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.app.checks import NO_TOKENIZER_FLAG, OVERRIDE_FLAG, check, check_model
from asyncrl.config import RunConfig, load_run
from asyncrl.config.derived import use_routing_replay
from asyncrl.errors import ConfigError, DataError, FilterFailed
from asyncrl.pipeline.sampling.scoring import verdict
from asyncrl.types import Picked, Prompt
from tests.unit.data.tiktoken_for_tests import tiktoken_folder
from tests.unit.models.test_shape import FLASH, QWEN3
from tests.unit.rewards.grading import sample
from tests.unit.scored_groups import group

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"


def quickstart(*flags: str) -> RunConfig:
    return load_run(["--config", str(QUICKSTART), *flags])


def test_engines_get_the_shape_flags_that_override_config_json() -> None:
    assert check_model(quickstart("--num-layers", "2")).server_flags == quickstart().sglang
    flags = check_model(quickstart("--norm-epsilon", "0.5")).server_flags
    assert flags == {**quickstart().sglang, OVERRIDE_FLAG: json.dumps({"rms_norm_eps": 0.5})}


def test_config_json_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real_open = list[str](), Path.open

    def noting_open(path: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append(path.name)
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", noting_open)
    check(quickstart("--norm-epsilon", "0.5"))
    assert opened.count("config.json") == 1


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--num-layers", "3"], "num-layers 3: config.json says 2, and the checkpoint's tensors have that size"),
        (
            ["--norm-epsilon", "0.5", f"--sglang-{OVERRIDE_FLAG}", "{}"],
            "--sglang-json-model-override-args with rms_norm_eps: leave one of them out",
        ),
        (
            ["--rollout-max-response-len", "30000", "--rollout-max-prompt-len", "5000"],
            "rollout-max-prompt-len 5000 + rollout-max-response-len 30000 = 35000 tokens, "
            "the model has 256 positions (max-position-embeddings)",
        ),
        (
            ["--rollout-max-response-len", "40", "--sglang-context-length", "30"],
            "rollout-max-response-len 40 tokens, the engines take 30 (sglang-context-length), and a prompt must have "
            "room as well",
        ),
        (
            ["--rollout-stop-token-ids", "5", "64", "-1"],
            "rollout-stop-token-ids 64: the model's token ids are 0 to 63",
        ),
        (
            ["--eval-max-response-len", "30000"],
            "eval-max-response-len 30000 tokens, the model has 256 positions (max-position-embeddings), "
            "and a prompt must have room as well",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(flags: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(quickstart(*flags))
    assert str(error.value) == line


def test_stop_tokens_of_a_held_out_set_are_compared_with_the_vocabulary(tmp_path: Path) -> None:
    sets = tmp_path / "sets.yaml"
    held_out = QUICKSTART.parent / "quickstart" / "heldout.jsonl"
    sets.write_text(f"datasets:\n- {{name: sums, path: {held_out}, stop_token_ids: [3, 99]}}\n")
    with pytest.raises(ConfigError) as error:
        check(quickstart("--eval-prompt-data", "--eval-config", str(sets), "--rollout-stop-token-ids", "63"))
    assert str(error.value) == f"{sets}: sums: stop_token_ids 99: the model's token ids are 0 to 63"


@pytest.mark.parametrize(
    ("changes", "flags", "line"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, [], ": cannot train GemmaForCausalLM; supported: Qwen2ForCausalLM, "),
        ({"vocab_size": 65}, [], " has a vocabulary size of 65, the policy 64; they must be equal"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            ["--tensor-model-parallel-size", "2", "--actor-num-gpus-per-node", "2"],
            ": tensor-model-parallel-size 2 does not divide the model's attention heads (3)",
        ),
    ],
)
def test_a_critic_that_cannot_be_trained_is_refused_before_anything_starts(
    changes: dict[str, Any], flags: list[str], line: str, tmp_path: Path
) -> None:
    critic = tmp_path / "critic"
    shutil.copytree(QUICKSTART.parent / "quickstart" / "model", critic)
    run = quickstart("--advantage-estimator", "ppo", "--critic-load", str(critic), *flags)
    assert check_model(run).shape.vocab_size == 64
    config = json.loads((critic / "config.json").read_text())
    (critic / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError) as error:
        check_model(run)
    assert str(error.value).startswith(f"critic-load {critic}{line}")


@pytest.mark.parametrize(("context", "prompts"), [("256", "less"), ("32", "none")])
def test_prompts_without_room_are_left_out(context: str, prompts: str, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "1+1=", "label": "2"}\n' + json.dumps({"prompt": "1+" * 300, "label": "3"}))
    flags = ["--prompt-data", str(path), "--sglang-context-length", context, "--rollout-max-response-len", "30"]
    run = quickstart(*flags, "--input-key", "prompt", "--label-key", "label")
    if prompts == "none":
        with pytest.raises(DataError, match="at most 2 tokens, for which there is room"):
            check(run)
    else:
        assert len(check(run).prompts) == 1


@pytest.mark.parametrize(("context", "prompts"), [(6, 1), (7, 2), (250, 2)])
def test_prompts_as_long_as_an_episode_may_be_are_left_out(context: int, prompts: int, tmp_path: Path) -> None:
    path, function = tmp_path / "train.jsonl", tmp_path / "mine.py"
    path.write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": "11+11=", "label": "22"}')
    function.write_text("async def episode(ep):\n    await ep.generate()\n")
    flags = ["--prompt-data", str(path), "--input-key", "prompt", "--label-key", "label"]
    flags += ["--rollout-max-context-len", str(context)]
    for more in ([], ["--custom-generate-function-path", f"{function}:episode"]):
        checked = check(quickstart(*flags, *more))
        checked.user_code.close()
        assert len(checked.prompts) == prompts


def test_engines_for_a_tiktoken_model_have_no_tokenizer_unless_the_user_allows_its_code(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(quickstart().model.hf_checkpoint, copy)
    (copy / "tokenizer.json").unlink()
    tiktoken_folder(copy)
    model = ["--hf-checkpoint", str(copy)]
    assert check(quickstart(*model)).model.server_flags == {**quickstart().sglang, NO_TOKENIZER_FLAG: True}
    stops = [*model, "--rollout-stop", "end"]
    with pytest.raises(ConfigError, match=r"rollout-stop with .*tiktoken\.model: engines compare texts, and SGLang's"):
        check_model(quickstart(*stops))
    with pytest.raises(
        ConfigError, match=r"eval-prompt-data arithmetic: min_new_tokens with .*: engines look up the end"
    ):
        check_model(quickstart(*model, "--eval-min-new-tokens", "3"))
    flags = check_model(quickstart(*stops, "--sglang-trust-remote-code")).server_flags
    assert flags == {**quickstart().sglang, "trust-remote-code": True}


@pytest.mark.parametrize(
    ("metadata", "flags", "line"),
    [
        ({}, (), "row 1: the row's metadata has no rm_type, and there is no --rm-type"),
        ({"rm_type": "remote_rm"}, (), "row 1: the row's rm_type is remote_rm; give --rm-url"),
        ({"rm_type": "remote_rm"}, ("--rm-url", "http://a"), None),
        ({"rm_type": "numbr"}, ("--rm-type", "exact"), "row 1: the row's rm_type must be one of number, exact, "),
        ({}, ("--rm-type", "exact"), None),
    ],
)
def test_the_reward_of_every_row_is_known(
    tmp_path: Path, metadata: dict[str, str], flags: tuple[str, ...], line: str | None
) -> None:
    rows = [{"prompt": "1+1=", "label": "2", "metadata": each} for each in ({"rm_type": "number"}, metadata)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    config = tmp_path / "run.toml"
    text = QUICKSTART.read_text().replace('"quickstart/', f'"{QUICKSTART.parent}/quickstart/')
    config.write_text("\n".join(each for each in text.splitlines() if not each.startswith(("rm-type", "eval-"))))
    run = load_run(["--config", str(config), "--prompt-data", str(file), *flags])
    if line is None:
        check(run)
        return
    with pytest.raises(DataError) as error:
        check(run)
    assert str(error.value).startswith(f"{file}: {line}")


@pytest.mark.parametrize(
    ("flags", "row", "expected"),
    [
        ((), {"rm_type": "exact"}, 1.0),
        (("--rm-type", "math"), {"rm_type": "f1"}, 1.0),
        (("--rm-type", "exact"), {}, 1.0),
        (("--no-rollout-skip-special-tokens",), {"rm_type": "exact"}, 0.0),
        (("--rm-type", "exact", "--no-rollout-skip-special-tokens"), {}, 0.0),
    ],
)
def test_the_end_token_is_no_word_of_a_response(
    tmp_path: Path, flags: tuple[str, ...], row: dict[str, str], expected: float
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "label": "2", "metadata": row}))
    config = tmp_path / "run.toml"
    text = QUICKSTART.read_text().replace('"quickstart/', f'"{QUICKSTART.parent}/quickstart/')
    config.write_text("\n".join(each for each in text.splitlines() if not each.startswith(("rm-type", "eval-"))))
    arguments = ["--config", str(config), "--prompt-data", str(file), "--metadata-key", "metadata", *flags]
    checked = check(load_run(arguments))
    ids = (*checked.tokenizer.encode("2"), checked.end_tokens[0])
    answer = sample(checked.tokenizer.decode(ids), token_ids=ids)
    prompt = Prompt(row=0, epoch=0, text="1+1=", token_ids=(1,), label="2", metadata=row)

    async def graded() -> Any:
        return await checked.reward(prompt, answer)

    assert asyncio.run(graded()).value == expected


def test_a_folder_for_weights_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        check(quickstart("--update-weight-transport", "disk", "--update-weight-disk-dir", "/proc/weights"))
    assert str(error.value).startswith("update-weight-disk-dir /proc/weights: cannot be written to: ")


def test_fp8_is_refused_where_there_is_no_gpu(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(quickstart().model.hf_checkpoint, copy)
    config = json.loads((copy / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": fp8}))
    check(quickstart("--hf-checkpoint", str(copy)))
    with pytest.raises(ConfigError) as error:
        check(quickstart("--hf-checkpoint", str(copy), "--device", "cpu"))
    assert str(error.value).startswith(f"hf-checkpoint: {copy} is in fp8, which SGLang serves on GPUs alone; ")


def test_latent_attention_is_refused_where_there_is_no_gpu(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(quickstart().model.hf_checkpoint, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps({**QWEN3, **FLASH, "rope_theta": 1e6, "vocab_size": config["vocab_size"]})
    )
    check_model(quickstart("--hf-checkpoint", str(copy)))
    with pytest.raises(ConfigError) as error:
        check_model(quickstart("--hf-checkpoint", str(copy), "--device", "cpu"))
    assert str(error.value).startswith(f"hf-checkpoint: {copy} has latent attention, which SGLang serves on GPUs alone")


def mixture(*flags: str) -> RunConfig:
    return load_run(["--config", str(QUICKSTART.with_name("quickstart_moe.toml")), *flags])


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (
            ["--sglang-moe-runner-backend", backend],
            f"sglang-moe-runner-backend {backend} chooses experts inside its kernel",
        )
        for backend in ("experimental_sgl_trtllm", "flashinfer_mxfp4", "flashinfer_trtllm", "triton_kernel")
    ]
    + [
        (["--sglang-enable-hierarchical-cache"], "sglang-enable-hierarchical-cache moves cached tokens"),
        (["--sglang-enable-lmcache"], "sglang-enable-lmcache moves cached tokens"),
        (["--sglang-enable-flexkv"], "sglang-enable-flexkv moves cached tokens"),
        (["--sglang-radix-cache-backend", "mine"], "sglang-radix-cache-backend may move cached tokens"),
        (["--sglang-enable-two-batch-overlap"], "sglang-enable-two-batch-overlap overwrites the experts"),
    ],
)
def test_routing_replay_is_off_where_sglang_records_no_experts_and_cannot_be_asked_for(
    flags: list[str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = mixture(*flags)
    check_model(run)
    assert not use_routing_replay(run, is_mixture=True)
    assert f"routing replay (use-rollout-routing-replay) is off: {why}" in caplog.text
    with pytest.raises(ConfigError, match=f"use-rollout-routing-replay with {why}"):
        check_model(mixture(*flags, "--use-rollout-routing-replay"))
    caplog.clear()
    check_model(mixture(*flags, "--no-use-rollout-routing-replay"))
    assert not caplog.records


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--sglang-pp-size", "2"], "--sglang-pp-size cannot be given"),
        (["--sglang-pipeline-parallel-size", "2"], "--sglang-pipeline-parallel-size cannot be given"),
        (["--moe-router-fusion"], "--moe-router-fusion .* is not here: a fused router ignores the engine's choice"),
        (["--moe-router-load-balancing-type", "sinkhorn"], "--moe-router-load-balancing-type sinkhorn"),
        (["--moe-router-load-balancing-type", "quantile_balancing"], "--moe-router-load-balancing-type quantile_bal"),
    ],
)
def test_neither_pipelines_of_engines_nor_routers_that_ignore_routes_can_be_asked_for(
    flags: list[str], line: str
) -> None:
    """SGLang's last pipeline stage knows its own layers alone; ``check_replayable`` refuses such routers as well."""
    with pytest.raises(ConfigError, match=line):
        mixture(*flags)


def test_routing_replay_is_for_mixtures_which_have_it_by_default(caplog: pytest.LogCaptureFixture) -> None:
    check_model(mixture("--sglang-moe-runner-backend", "triton"))
    assert not caplog.records
    assert use_routing_replay(mixture(), is_mixture=True)
    assert not use_routing_replay(mixture("--no-use-rollout-routing-replay"), is_mixture=True)
    assert not use_routing_replay(quickstart(), is_mixture=False)
    with pytest.raises(ConfigError, match=r"use-rollout-routing-replay: .* is no mixture of experts; leave it out"):
        check_model(quickstart("--use-rollout-routing-replay"))


FILTERS = """
import time

from asyncrl.types import Picked

def keep(group):
    time.sleep(0.06)

def pick(step, waiting, size):
    time.sleep(0.06)
    return Picked(train=tuple(each.group_id for each in waiting))
"""


def test_filters_that_block_the_event_loop_are_named_with_flag_and_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILTERS)
    flags = ("--dynamic-sampling-filter-path", f"{file}:keep", "--buffer-filter-path", f"{file}:pick")
    checked = check(quickstart(*flags))
    assert checked.pick is not None
    assert verdict(checked.keep, group(0, [1.0])) is None
    assert checked.pick(1, (), 4) == Picked(train=())
    keep, pick = (line.partition(" blocked the event loop for ")[0] for line in caplog.messages)
    assert keep == f"--dynamic-sampling-filter-path '{file}:keep'"
    assert pick == f"--buffer-filter-path '{file}:pick'"


def test_an_error_of_a_filter_names_flag_path_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def keep(args, samples, **kwargs):\n    return samples[0].reward[0]\n")
    monkeypatch.chdir(tmp_path)
    checked = check(quickstart("--dynamic-sampling-filter-path", "mine.py:keep"))
    with pytest.raises(FilterFailed) as error:
        verdict(checked.keep, group(3, (0.0, 1.0)))
    label = f"--dynamic-sampling-filter-path '{tmp_path}/mine.py:keep'"
    text = "TypeError: 'float' object is not subscriptable (mine.py:2, in keep)"
    assert str(error.value) == f"row 3: {label}: {text}"
