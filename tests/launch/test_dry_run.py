"""A dry run makes the checks of a run, lists the paths that are missing, and starts nothing."""

import io
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.app.dry_run import dry_run, estimate
from asyncrl.app.entry import main
from asyncrl.config import load_run
from asyncrl.errors import ConfigError, DataError
from asyncrl.models.shape import read_shape

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = ("--config", str(CONFIGS / "quickstart.toml"), "--dry-run")
MODELS = Path(__file__).parent / "models"
REQUIRED = "--num-rollout 1 --rollout-batch-size 8 --n-samples-per-prompt 2 --label-key label --rm-type exact --dry-run"


def said(*flags: str) -> str:
    """The output of a dry run with these flags, with lines wide enough not to be wrapped."""
    console = Console(file=io.StringIO(), width=200)
    dry_run(load_run(flags), console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def model(name: str, *flags: str) -> tuple[str, ...]:
    return ("--hf-checkpoint", str(MODELS / name), "--prompt-data", "nowhere.jsonl", *REQUIRED.split(), *flags)


def test_a_run_that_has_everything_is_checked_whole(tmp_path: Path) -> None:
    text = said(*QUICKSTART)
    assert "not there yet" not in text
    assert text.endswith("the dry run found nothing wrong\n")
    assert "3,999, the longest of 6 tokens; the memory counts 0 tokens of a prompt" in text
    assert "arithmetic: 128 prompts, 2 answers per prompt" in text
    assert "1 rollout (1 x 1); without GPUs, as many processes" in text
    assert " processes      " in said(*QUICKSTART, "--device", "cpu")
    assert "longest of 6 tokens; limit: 6 tokens" in said(*QUICKSTART, "--rollout-max-prompt-len", "6")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    with pytest.raises(DataError, match="label"):
        said(*QUICKSTART, "--prompt-data", str(tmp_path / "train.jsonl"))


def test_missing_paths_are_named_and_not_counted_as_mistakes() -> None:
    text = said(*model("qwen3-4b", "--actor-num-gpus-per-node", "2", "--ref-load", "/nowhere"))
    lines = [line for line in text.splitlines() if line.startswith("not there yet: ")]
    assert lines == [
        f"not there yet: hf-checkpoint {MODELS / 'qwen3-4b'} has no tokenizer.json, no *.safetensors",
        f"not there yet: prompt-data {Path.cwd() / 'nowhere.jsonl'}: no such file",
        "not there yet: ref-load /nowhere: no such folder",
    ]
    assert text.endswith("found nothing wrong, but the run cannot start here: 3 things are not there yet\n")
    assert re.search("prompts +the memory counts 0 tokens of a prompt *\n", text)


def test_a_reference_model_without_weights_is_not_there_yet_like_the_model_itself(tmp_path: Path) -> None:
    quickstart = CONFIGS / "quickstart" / "model"
    bare = tmp_path / "model"
    bare.mkdir()
    for file in (path for path in quickstart.iterdir() if path.suffix != ".safetensors"):
        (bare / file.name).write_bytes(file.read_bytes())
    text = said(*QUICKSTART, "--hf-checkpoint", str(bare), "--ref-load", str(bare))
    assert [line for line in text.splitlines() if line.startswith("not there yet: ")] == [
        f"not there yet: hf-checkpoint {bare} has no *.safetensors",
        f"not there yet: ref-load {bare} has no *.safetensors",
    ]
    assert text.endswith("found nothing wrong, but the run cannot start here: 2 things are not there yet\n")
    with pytest.raises(ConfigError, match=rf"^ref-load {tmp_path} has neither a checkpoint nor a model in Hugging"):
        said(*QUICKSTART, "--ref-load", str(tmp_path))


def test_without_a_trainer_only_the_engines_memory_is_computed() -> None:
    flags = ("--actor-num-gpus-per-node", "2", "--gpu-memory-gb", "24")
    with pytest.raises(ConfigError, match="trainer"):
        said(*model("qwen3-4b", *flags))
    text = said(*model("qwen3-4b", *flags, "--debug-rollout-only"))
    assert "1: no trainer, 1 rollout (1 x 1)" in text
    assert "trainer rank" not in text
    assert "KV cache" in text


@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
def test_the_reference_model_waits_in_host_memory(estimator: str) -> None:
    flags = ("--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "2", "--gpu-memory-gb", "141")
    plain = said(*model("qwen3-4b", *flags))
    assert "reference model" not in plain
    text = said(*model("qwen3-4b", *flags, "--use-kl-loss", "--advantage-estimator", estimator))
    (weights,) = re.findall(r"trainer rank.*\n +weights +([\d.]+)", plain)
    (per_node, per_rank) = re.findall(
        r"host memory +([\d.]+) GB per node: ([\d.]+) of each rank for the reference", text
    )[0]
    assert float(weights) == pytest.approx(4.0, abs=0.5)  # 4 billion of two bytes, on two ranks
    assert float(per_rank) == pytest.approx(2 * float(weights), abs=0.15)
    assert float(per_node) == pytest.approx(4 * float(per_rank), abs=0.25)


def test_without_the_flag_a_missing_path_is_a_mistake() -> None:
    flags = [flag for flag in model("qwen3-4b") if flag != "--dry-run"]
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_run(flags)


def test_a_folder_without_config_json_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hf-checkpoint: no"):
        said(*model("qwen3-4b", "--hf-checkpoint", str(tmp_path)))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--tensor-model-parallel-size 3 --actor-num-gpus-per-node 3",
            r"does not divide the model's attention heads \(32\)",
        ),
        (
            "--rollout-num-gpus 3 --rollout-num-gpus-per-engine 3",
            r"rollout-num-gpus-per-engine 3 does not divide the model's attention heads \(32\)",
        ),
        ("--sglang-no-such-flag 1", "unknown flag --sglang-no-such-flag"),
        ("--custom-rm-path no_such_module.reward", "no_such_module"),
        ("--max-staleness 0 --update-weights-interval 3", "max-staleness 0 is impossible with"),
        ("--colocate --max-staleness 1", "colocate with max-staleness 1"),
        (
            "--colocate --max-staleness 0 --gpu-memory-gb 16 --update-weight-buffer-size 1000000000",
            "a weight update needs 18.1 GB of a GPU that trainer and engine share, which has 16 GB",
        ),
        ("--gpu-memory-gb 60", "spread the model over more ranks"),
        ("--max-tokens-per-gpu 65536", "or set recompute-granularity full"),
        ("--rollout-max-response-len 40961", "the model has 40960 positions"),
        ("--sglang-max-total-tokens 1000", "holds 1,000 tokens, one answer with its prompt may have 1,024"),
    ],
)
def test_a_configuration_that_a_run_would_refuse_is_refused(flags: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        said(*model("qwen3-4b", "--actor-num-gpus-per-node", "4", *flags.split()))


def test_servers_need_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks_sglang(name: str) -> object:
        return None if name == "sglang" else find_spec(name)

    def not_here() -> frozenset[str]:
        raise ModuleNotFoundError("No module named 'sglang'")

    monkeypatch.setattr("asyncrl.app.dry_run.find_spec", lacks_sglang)
    monkeypatch.setattr("asyncrl.app.checks.known_server_flags", not_here)
    text = said(*QUICKSTART)
    assert "not there yet: sglang is not installed: --sglang- and --router- flags are not checked" in text
    assert text.endswith("found nothing wrong, but the run cannot start here: 1 thing is not there yet\n")


def test_nothing_is_said_of_memory_on_a_cpu() -> None:
    text = said(*QUICKSTART, "--device", "cpu", "--gpu-memory-gb", "0.001")
    assert "not computed with --device cpu" in text


def test_the_quickstart_of_mixtures_replays_routes_also_on_a_cpu() -> None:
    assert "routing replay" not in said(*QUICKSTART)
    mixture = ("--config", str(CONFIGS / "quickstart_moe.toml"), "--dry-run", "--device", "cpu")
    assert re.search("routing replay +on", said(*mixture))
    assert re.search("routing replay +off", said(*mixture, "--sglang-moe-runner-backend", "triton_kernel"))


def test_a_shared_gpu_has_to_hold_the_larger_of_both_sides() -> None:
    flags = model("qwen3-4b", "--actor-num-gpus-per-node", "4", "--colocate", "--max-staleness", "0")
    run = load_run(flags)
    found = estimate(run, read_shape(run.model.hf_checkpoint))
    assert found.fullest.copy == found.engine.update_buffers == 0
    assert found.both == found.fullest.weights + found.engine.weights + 2 * 512 * 1024**2
    text = said(*flags)
    assert "4, time-shared: 4 trainer (1 x 4), 4 rollout (4 x 1)" in text
    each = (found.fullest.weights + found.fullest.optimizer) / 1e9
    assert f"{4 * each:.1f} GB per node" in text
    assert "shared GPU" not in said(*model("qwen3-4b", "--actor-num-gpus-per-node", "4"))


def test_a_critic_is_a_second_model_without_an_output_layer() -> None:
    run = load_run(model("qwen3-4b", "--advantage-estimator", "ppo"))
    shape = read_shape(run.model.hf_checkpoint)
    (both,) = estimate(run, shape).stages
    (alone,) = estimate(load_run(model("qwen3-4b")), shape).stages
    assert both.weights == 2 * alone.weights  # Qwen3-4B's output layer is its embedding
    assert both.activations == alone.activations


def test_weights_that_go_by_disk_take_no_buffers_on_gpus(tmp_path: Path) -> None:
    by_disk = ("--update-weight-transport", "disk", "--update-weight-disk-dir", str(tmp_path / "weights"))
    run, other = (load_run(model("qwen3-4b", *flags)) for flags in (by_disk, ()))
    shape = read_shape(run.model.hf_checkpoint)
    found, broadcast = estimate(run, shape), estimate(other, shape)
    assert (found.fullest.copy, found.engine.update_buffers) == (0, 0)
    assert broadcast.fullest.copy == pytest.approx(2 * 4.02e9, rel=0.01)
    in_fp8 = estimate(other, replace(shape, fp8_block=(128, 128)))
    assert in_fp8.fullest.copy == pytest.approx(2 * 0.389e9 + 3.63e9, rel=0.01)  # the embedding stays as it is
    assert not list(tmp_path.iterdir())


def test_microbatches_hold_the_longest_sample() -> None:
    shape = read_shape(MODELS / "qwen3-4b")

    def tokens(*flags: str) -> float:
        return estimate(load_run(model("qwen3-4b", *flags)), shape).work.num_tokens

    longest = ("--rollout-max-response-len", "30000", "--rollout-max-prompt-len", "2000")
    assert tokens() == 8192
    assert tokens(*longest) == 32_000
    assert tokens(*longest, "--context-parallel-size", "4", "--actor-num-gpus-per-node", "4") == 8192
    assert tokens(*longest, "--micro-batch-size", "3") == 96_000
    episodes = ("--custom-generate-function-path", "a.py:f", "--rollout-max-context-len", "20000")
    assert tokens(*longest, *episodes) == 20_000


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*QUICKSTART, "--save", "checkpoints"]) == 0
    assert main([*QUICKSTART, "--gpu-memory-gb", "0.001"]) == 2
    assert "error: a trainer rank needs" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "neither a run directory nor a folder for checkpoints"
