"""The choice between local layers and those of TransformerEngine.

TransformerEngine needs a GPU: without one only the names of its weights are tested.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from asyncrl.config.areas import ModelConfig, TransformerImpl
from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.engines.megatron import TrainerSettings
from asyncrl.engines.megatron.checkpoint.directory import Origin, latest
from asyncrl.engines.megatron.model.build import transformer_config
from asyncrl.engines.megatron.model.implementation import check_alike, unfused, with_implementation
from asyncrl.engines.megatron.rank import MegatronRank
from asyncrl.errors import ConfigError
from asyncrl.models.shape import read_shape
from asyncrl.types import TrainReport
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.hidden import hide_te
from tests.engines.megatron.layouts import layout, processes
from tests.engines.megatron.tiny import free_port, one_rank, random_batch, trainer_settings, write_checkpoint
from tests.save_targets import target as target_of

pytestmark = pytest.mark.filterwarnings("ignore:::torch")  # torch warns about calls by Megatron

without_te = pytest.mark.skipif(HAVE_TE, reason="needs a CPU run, which TransformerEngine forbids")
with_te = pytest.mark.skipif(not HAVE_TE, reason="needs TransformerEngine")
WITHOUT_LATENT = [name for name in TINY if name not in ("glm4.7-flash", "deepseek-v3", "moonlight")]
"""The other models: those with latent attention always have local layers."""
SPAWN = multiprocessing.get_context("spawn")
AUTO: TransformerImpl = "auto"
LOCAL: TransformerImpl = "local"
FUSED: TransformerImpl = "transformer_engine"
Rows = Sequence[Sequence[float]]
"""Log-probs of each sample."""


def asked(layers: TransformerImpl, device: str, dtype: str = "bfloat16", **parallel: Any) -> TrainerSettings:
    """The settings of a trainer; the folder need not exist."""
    return trainer_settings(
        Path("nowhere"),
        model=ModelConfig(hf_checkpoint=Path("nowhere"), transformer_impl=layers),
        device=device,
        dtype=dtype,
        parallel=ParallelConfig(**parallel),
    )


@pytest.mark.parametrize(
    ("is_installed", "layers", "device", "line"),
    [
        (False, FUSED, "cuda", "transformer-impl transformer_engine: TransformerEngine cannot be imported on"),
        (True, LOCAL, "cpu", "device cpu: TransformerEngine or Apex is installed"),
        (True, AUTO, "cpu", "device cpu: TransformerEngine or Apex is installed"),
    ],
)
def test_an_impossible_choice_of_layers_is_refused(
    is_installed: bool, layers: TransformerImpl, device: str, line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        with_implementation(asked(layers, device), has_layers=is_installed, has_adam=is_installed)


@pytest.mark.parametrize(
    ("is_installed", "settings", "layers"),
    [
        (False, asked(LOCAL, "cpu"), LOCAL),
        (False, asked(LOCAL, "cuda"), LOCAL),
        (True, asked(LOCAL, "cuda"), LOCAL),
        (True, asked(FUSED, "cuda"), FUSED),
        (False, asked(AUTO, "cpu"), LOCAL),
        (False, asked(AUTO, "cuda"), LOCAL),
        (True, asked(AUTO, "cuda"), FUSED),
        (True, asked(AUTO, "cuda", "float32"), LOCAL),
        (True, asked(AUTO, "cuda", recompute_granularity="selective", recompute_modules=("layernorm",)), LOCAL),
    ],
)
def test_auto_takes_transformer_engine_where_it_can_and_explicit_choices_win(
    is_installed: bool, settings: TrainerSettings, layers: TransformerImpl
) -> None:
    found = with_implementation(settings, has_layers=is_installed, has_adam=is_installed)
    assert found == replace(settings, model=replace(settings.model, transformer_impl=layers))


def test_latent_attention_uses_local_layers(tmp_path: Path) -> None:
    shape = read_shape(write_tiny(tmp_path / "hf", TINY["deepseek-v3"]))
    with processes(0, 1, free_port()), layout():
        config = transformer_config(shape, torch.device("cuda"), torch.bfloat16, ParallelConfig(), FUSED)
    assert config.transformer_impl == LOCAL


def test_ranks_must_have_the_same_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = asked(LOCAL, "cuda")
    monkeypatch.setattr("asyncrl.engines.megatron.model.implementation.of_every_rank", lambda mine: [mine, FUSED, mine])
    with pytest.raises(ConfigError, match="cannot be imported on ranks 0, 2, but can be on others"):
        check_alike(settings)
    monkeypatch.setattr("asyncrl.engines.megatron.model.implementation.of_every_rank", lambda mine: [mine, mine])
    check_alike(settings)


@pytest.mark.parametrize(
    ("fused", "plain"),
    [
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.3.input_layernorm.weight"),
        ("decoder.layers.3.mlp.linear_fc1.layer_norm_weight", "decoder.layers.3.pre_mlp_layernorm.weight"),
        *[
            (name, name)
            for name in (
                "decoder.layers.3.mlp.linear_fc1.weight",
                "decoder.layers.3.mlp.shared_experts.linear_fc1.weight",
                "decoder.layers.3.self_attention.q_layernorm.weight",
                "decoder.final_layernorm.weight",
            )
        ],
    ],
)
def test_fused_and_plain_layers_share_one_name_for_each_weight(fused: str, plain: str) -> None:
    assert unfused(fused) == plain


def on_gpu(checkpoint: Path, impl: TransformerImpl, **changes: Any) -> TrainerSettings:
    return trainer_settings(
        checkpoint,
        model=ModelConfig(hf_checkpoint=checkpoint, transformer_impl=impl),
        device="cuda",
        dtype="bfloat16",
        **changes,
    )


def difference(one: Rows, other: Rows) -> float:
    """The mean absolute difference of log-probs."""
    pairs = [(a, b) for ones, others in zip(one, other, strict=True) for a, b in zip(ones, others, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def trained_once(checkpoint: Path) -> TrainReport:
    with one_rank(trainer_settings(checkpoint)) as rank:
        return rank.train(random_batch())


@pytest.fixture(scope="module")
def without_gpus() -> Iterator[Callable[..., Any]]:
    """Call a function in a process that sees no GPU, because Megatron uses every GPU that it sees."""
    with (
        pytest.MonkeyPatch.context() as patch,
        ProcessPoolExecutor(1, mp_context=SPAWN) as pool,
    ):
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        pool.submit(torch.cuda.device_count).result(timeout=360.0)
        patch.undo()
        yield lambda function, *args: pool.submit(function, *args).result(timeout=360.0)


@pytest.mark.gpu
@without_te
@pytest.mark.parametrize("family", TINY)
def test_a_gpu_and_a_cpu_compute_the_same_step(tmp_path: Path, without_gpus: Callable[..., Any], family: str) -> None:
    checkpoint = write_tiny(tmp_path / "hf", TINY[family], dtype="bfloat16")
    expected = without_gpus(trained_once, checkpoint)
    with one_rank(on_gpu(checkpoint, LOCAL)) as rank:
        found = rank.train(random_batch())
    assert difference(found.logprobs, expected.logprobs) < 0.03
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)


@pytest.mark.gpu
@with_te
@pytest.mark.parametrize("family", WITHOUT_LATENT)
def test_local_and_transformer_engine_layers_train_alike(tmp_path: Path, family: str) -> None:
    checkpoint = write_tiny(tmp_path / "hf", TINY[family], dtype="bfloat16")
    reports, names = {}, {}
    for impl in (LOCAL, FUSED):
        with one_rank(on_gpu(checkpoint, impl)) as rank:
            assert rank.layers == impl
            names[impl] = {name for bucket in rank.weight_buckets() for name in bucket.names}
            reports[impl] = [rank.train(random_batch(seed=step, step=step)) for step in range(3)]
    assert names[LOCAL] == names[FUSED]
    for local, fused in zip(reports[LOCAL], reports[FUSED], strict=True):
        assert difference(local.logprobs, fused.logprobs) < 0.03
        assert fused.grad_norm == pytest.approx(local.grad_norm, rel=0.05)


@pytest.mark.gpu
@with_te
@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize(("first", "second"), [(LOCAL, FUSED), (FUSED, LOCAL), (FUSED, FUSED)])
def test_a_checkpoint_resumes_under_the_other_kind_of_layers(
    tmp_path: Path, first: TransformerImpl, second: TransformerImpl, moe: bool
) -> None:
    checkpoint = write_checkpoint(tmp_path / "hf", moe=moe, dtype="bfloat16")
    _, straight = trained_until_the_fifth(on_gpu(checkpoint, first), tmp_path / "saved", True)
    _, after = trained_until_the_fifth(on_gpu(checkpoint, second), tmp_path / "saved", False)
    for one, other in zip(straight, after, strict=True):
        assert difference(one.logprobs, other.logprobs) < 0.03
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=0.05)


@pytest.mark.gpu
@with_te
def test_an_untrained_policy_is_saved_with_its_critic(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "hf", dtype="bfloat16")
    settings = on_gpu(checkpoint, FUSED, advantage_estimator="ppo", num_critic_only_steps=3)
    with one_rank(settings) as rank:
        rank.train(random_batch())
        save(rank, tmp_path / "saved", 1)
        straight = [rank.train(random_batch(seed=step, step=step)) for step in range(1, 5)]
    with one_rank(settings) as rank:
        load(rank, tmp_path / "saved")
        after = [rank.train(random_batch(seed=step, step=step)) for step in range(1, 5)]
    for one, other in zip(straight, after, strict=True):
        assert difference(one.logprobs, other.logprobs) < 0.03


@pytest.mark.gpu
@with_te
@pytest.mark.parametrize("had_te", [False, True])
def test_a_run_resumes_after_transformer_engine_was_installed_or_removed(tmp_path: Path, had_te: bool) -> None:
    settings = on_gpu(write_checkpoint(tmp_path / "hf", dtype="bfloat16"), AUTO)
    with ProcessPoolExecutor(1, mp_context=SPAWN, initializer=hide_te) as without_te:
        here, there = (
            trained_until_the_fifth,
            lambda *args: without_te.submit(trained_until_the_fifth, *args).result(120.0),
        )
        begins, goes_on = (here, there) if had_te else (there, here)
        layers, straight = begins(settings, tmp_path / "saved", True)
        other_layers, after = goes_on(settings, tmp_path / "saved", False)
    assert (layers, other_layers) == ((FUSED, LOCAL) if had_te else (LOCAL, FUSED))
    for one, other in zip(straight, after, strict=True):
        assert difference(one.logprobs, other.logprobs) < 0.03
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=0.05)


def trained_until_the_fifth(settings: TrainerSettings, folder: Path, begins: bool) -> tuple[str, list[TrainReport]]:
    """The kind of layers, and the reports of the last three of five steps; the first two are trained, or loaded."""
    with one_rank(settings) as rank:
        if begins:
            for step in range(2):
                rank.train(random_batch(seed=step, step=step))
            save(rank, folder, 2)
        else:
            load(rank, folder)
        return rank.layers, [rank.train(random_batch(seed=step, step=step)) for step in range(2, 5)]


def save(rank: MegatronRank, root: Path, step: int) -> None:
    rank.begin_checkpoint(target_of(root, step), {}, with_optimizer=True)
    rank.finish_checkpoint()


def load(rank: MegatronRank, root: Path) -> None:
    folder = latest(root)
    assert folder is not None
    rank.load(Origin(folder=folder, kind="resume", optimizer=True))
