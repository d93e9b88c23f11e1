"""Each family at tiny size computes the numbers of transformers, and writes the checkpoint that it read."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from asyncrl.engines.megatron.weights.hf_weights import export_bucket, plan_buckets, save_hf
from asyncrl.models.shape import ModelShape
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.layouts import (
    Tensors,
    layout,
    loaded,
    logit_weights,
    logits_and_gradients,
    processes,
    sequences,
)
from tests.engines.megatron.tiny import free_port


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with processes(0, 1, free_port()), layout():
        yield


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory, one_process: None) -> tuple[torch.nn.Module, ModelShape]:
    return loaded(write_tiny(tmp_path_factory.mktemp("deepseek") / "hf", TINY["deepseek-v3"]))


def reference(checkpoint: Path) -> tuple[torch.Tensor, Tensors]:
    """Logits and gradients by transformers, in the form that ``logits_and_gradients`` returns."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    logits = torch.cat([model(row[None], use_cache=False).logits[0] for row in sequences()])
    (logits * logit_weights()).sum().backward()  # type: ignore[no-untyped-call]  # torch is untyped
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def stacked_as_in_transformers(grads: Tensors, name: str) -> torch.Tensor:
    """Stack the experts of each layer into one tensor, as transformers has them."""
    if name in grads:
        return grads[name]
    layer = name.rpartition(".")[0]
    kinds = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
    count = len({key for key in grads if key.startswith(layer) and key.endswith("down_proj.weight")})
    experts = range(count)
    return torch.stack([torch.cat([grads[f"{layer}.{e}.{kind}_proj.weight"] for kind in kinds]) for e in experts])


def change_config(checkpoint: Path, **changes: object) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def tensors_of(folder: Path) -> Tensors:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("family", TINY)
def test_logits_logprobs_and_gradients_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    checkpoint = write_tiny(tmp_path, TINY[family])
    expected, expected_grads = reference(checkpoint)
    got, grads = logits_and_gradients(*loaded(checkpoint))
    assert got is not None
    assert expected.std() > 0.3  # far enough from nothing
    assert (got - expected).abs().max() < 1e-4
    assert (got.log_softmax(-1) - expected.log_softmax(-1)).abs().max() < 1e-4
    for name, grad in expected_grads.items():
        assert (stacked_as_in_transformers(grads, name) - grad).abs().max() < 1e-5 * grad.abs().max(), name


@pytest.mark.parametrize("family", TINY)
def test_a_checkpoint_comes_back_bit_by_bit(tmp_path: Path, family: str) -> None:
    checkpoint = write_tiny(tmp_path / "hf", TINY[family], dtype="bfloat16")
    model, shape = loaded(checkpoint, torch.bfloat16)
    save_hf(model, shape, checkpoint, tmp_path / "out")
    buckets, sources = plan_buckets(model, shape, 20_000)
    sent = [list(export_bucket(model, shape, weights)) for weights in sources]
    before, after = tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor)
        assert after[name].dtype == tensor.dtype
    assert len(buckets) > 1
    for bucket, tensors in zip(buckets, sent, strict=True):
        assert bucket.names == tuple(name for name, _ in tensors)
        assert bucket.shapes == tuple(tuple(tensor.shape) for _, tensor in tensors)
    received = {name: tensor for tensors in sent for name, tensor in tensors}
    assert received.keys() == before.keys()
    assert all(torch.equal(received[name].bfloat16(), tensor.bfloat16()) for name, tensor in before.items())


@pytest.mark.parametrize("max_bytes", range(500, 8000, 500))
def test_weights_that_sglang_fuses_travel_in_one_bucket(
    deepseek: tuple[torch.nn.Module, ModelShape], max_bytes: int
) -> None:
    buckets, _ = plan_buckets(*deepseek, max_bytes)
    for bucket in buckets:
        down = [name for name in bucket.names if name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight"))]
        assert len(down) % 2 == 0
        assert {name.partition(".self_attn")[0] for name in down[::2]} == {
            n.partition(".self_attn")[0] for n in down[1::2]
        }


def test_fp8_weights_are_dequantized_when_they_are_read(tmp_path: Path) -> None:
    checkpoint = write_tiny(tmp_path / "hf", TINY["moonlight"], dtype="bfloat16")
    before = tensors_of(checkpoint)
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"  # 24 x 32: the last blocks are not full
    scales = torch.rand(2, 3) + 0.5
    quantised = (before[name].float() * 100).to(torch.float8_e4m3fn)
    save_file({**before, name: quantised, f"{name}_scale_inv": scales}, checkpoint / "model.safetensors")
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 12]}
    change_config(checkpoint, quantization_config=fp8)
    model, shape = loaded(checkpoint)
    save_hf(model, shape, checkpoint, tmp_path / "out")
    after = tensors_of(tmp_path / "out")
    expected = quantised.float().clone()
    for row, column in itertools.product(range(24), range(32)):
        expected[row, column] *= scales[row // 16, column // 12]
    assert after.keys() == before.keys()
    assert torch.equal(after[name], expected.bfloat16())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_layers_for_multi_token_prediction_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = write_tiny(tmp_path / "hf", TINY["glm4.5"])
    before = tensors_of(checkpoint)
    extra = {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    save_file({**before, **extra}, checkpoint / "model.safetensors")
    change_config(checkpoint, num_nextn_predict_layers=1)
    model, shape = loaded(checkpoint)
    save_hf(model, shape, checkpoint, tmp_path / "out")
    assert "its 1 layers for multi-token prediction are not trained and not saved" in caplog.text
    assert tensors_of(tmp_path / "out").keys() == before.keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
