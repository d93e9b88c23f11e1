"""Whose layers the trainer has.  Those of TransformerEngine need a GPU: without one only their names are tested."""

import pytest
import torch
from families import TINY, write_tiny
from tiny import one_rank, random_batch, trainer_settings, write_checkpoint

from asyncrl.config.areas import ModelConfig
from asyncrl.engines.checkpoints import Origin, folder_of, latest
from asyncrl.engines.megatron import implementation
from asyncrl.engines.megatron.fits import check_implementation
from asyncrl.engines.megatron.sharding import unfused
from asyncrl.errors import ConfigError

needs_gpu = pytest.mark.skipif(
    not (implementation.HAVE_TE and torch.cuda.is_available()), reason="needs TransformerEngine and a GPU"
)
LOCAL, FUSED = "local", "transformer_engine"


@pytest.mark.parametrize(
    ("is_installed", "layers", "device", "line"),
    [
        (False, FUSED, "cuda", "transformer-impl transformer_engine: it cannot be imported"),
        (True, LOCAL, "cpu", "device cpu: TransformerEngine is installed"),
    ],
)
def test_what_cannot_be_is_said(monkeypatch, is_installed, layers, device, line):
    monkeypatch.setattr(implementation, "HAVE_TE", is_installed)
    with pytest.raises(ConfigError, match=line):
        implementation.check_installed(layers, device)


@pytest.mark.parametrize(("is_installed", "layers"), [(False, LOCAL), (True, LOCAL), (True, FUSED)])
def test_what_can_be_is_let_through(monkeypatch, is_installed, layers):
    monkeypatch.setattr(implementation, "HAVE_TE", is_installed)
    implementation.check_installed(layers, "cuda")


def test_it_is_refused_on_a_cpu_before_anything_starts():
    check_implementation("local", "cpu")
    check_implementation("transformer_engine", "cuda")
    with pytest.raises(ConfigError, match="transformer-impl transformer_engine: it needs GPUs"):
        check_implementation("transformer_engine", "cpu")


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
def test_weights_have_one_name(fused, plain):
    assert unfused(fused) == plain


def on_gpu(checkpoint, impl: str, **changes):
    return trainer_settings(
        checkpoint,
        model=ModelConfig(hf_checkpoint=checkpoint, transformer_impl=impl),
        device="cuda",
        dtype="bfloat16",
        **changes,
    )


def difference(one, other) -> float:
    """Of log-probs, mean and absolute."""
    pairs = [(a, b) for ones, others in zip(one, other, strict=True) for a, b in zip(ones, others, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


@needs_gpu
@pytest.mark.parametrize("family", TINY)
def test_both_train_alike(tmp_path, family):
    checkpoint = write_tiny(tmp_path / "hf", TINY[family], dtype="bfloat16")
    reports, names = {}, {}
    for impl in (LOCAL, FUSED):
        with one_rank(on_gpu(checkpoint, impl, lr=1e-3)) as rank:
            names[impl] = {name for bucket in rank.weight_buckets() for name in bucket.names}
            reports[impl] = [rank.train(random_batch(seed=step, step=step)) for step in range(3)]
    assert names[LOCAL] == names[FUSED]
    for local, fused in zip(reports[LOCAL], reports[FUSED], strict=True):
        assert difference(local.logprobs, fused.logprobs) < 0.03
        assert fused.grad_norm == pytest.approx(local.grad_norm, rel=0.05)


@needs_gpu
@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize(("first", "second"), [(LOCAL, FUSED), (FUSED, LOCAL), (FUSED, FUSED)])
def test_a_checkpoint_of_one_goes_on_in_the_other(tmp_path, first, second, moe):
    checkpoint = write_checkpoint(tmp_path / "hf", moe=moe, dtype="bfloat16")
    with one_rank(on_gpu(checkpoint, first)) as rank:
        for step in range(2):
            rank.train(random_batch(seed=step, step=step))
        rank.begin_checkpoint(folder_of(tmp_path / "saved", 2), {}, with_optimizer=True)
        rank.finish_checkpoint()
        straight = [rank.train(random_batch(seed=step, step=step)) for step in range(2, 5)]
    with one_rank(on_gpu(checkpoint, second)) as rank:
        rank.load(Origin(folder=latest(tmp_path / "saved"), kind="resume", optimizer=True))
        after = [rank.train(random_batch(seed=step, step=step)) for step in range(2, 5)]
    for one, other in zip(straight, after, strict=True):
        assert difference(one.logprobs, other.logprobs) < 0.03
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=0.05)
