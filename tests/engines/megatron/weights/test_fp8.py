"""The conversion of weights for engines that serve them in fp8."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from asyncrl.engines.megatron.weights.fp8 import fp8_of, quantised
from asyncrl.engines.megatron.weights.update_group import flatten
from asyncrl.engines.weight_sync.flat import views
from asyncrl.errors import ConfigError
from asyncrl.models.shape import read_shape
from asyncrl.models.sizes import fp8_size, sent_bytes
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.tiny import one_rank, random_batch, trainer_settings, write_checkpoint
from tests.engines.megatron.weights.fp8_checkpoints import IN_FULL, by_blocks, in_fp8, meant, tensors_of

E4M3 = torch.float8_e4m3fn


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))


def random_matrix(rows: int, columns: int) -> torch.Tensor:
    """A random matrix whose blocks differ in magnitude."""
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=draw) * 10 ** torch.randn(rows, 1, generator=draw)


@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (128, 128), (1, 1), (130, 500), (576, 64)])
def test_quantized_numbers_and_scales_equal_those_of_a_loop_over_blocks(rows: int, columns: int) -> None:
    matrix = random_matrix(rows, columns)
    numbers, scales = quantised(matrix, (128, 128), torch.float32)
    scaled, expected = by_blocks(matrix.numpy(), (128, 128))
    assert torch.equal(scales, torch.from_numpy(expected))
    assert same_bits(numbers, torch.from_numpy(scaled).to(E4M3))
    assert (numbers.shape, numbers.is_contiguous()) == (matrix.shape, True)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_rounding_errors_of_fp8_are_within_the_format(scale_dtype: torch.dtype) -> None:
    matrix = random_matrix(300, 260)
    back = meant(*quantised(matrix, (128, 128), scale_dtype), (128, 128))
    _, scales = by_blocks(matrix.numpy(), (128, 128))
    smallest = torch.from_numpy(scales).repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :260] * 2.0**-10
    # Three bits behind the point: half of the last one is 2^-4.  Below 2^-6, steps are 2^-9 whatever the number.
    assert ((back - matrix).abs() <= torch.maximum(matrix.abs() * 2.0**-4, smallest) * (1 + 2**-6)).all()
    assert back.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_came_from_fp8_go_back_unchanged(dtype: torch.dtype) -> None:
    numbers, scales = quantised(random_matrix(256, 300), (128, 128), torch.float32)
    again, scales_again = quantised(meant(numbers, scales, (128, 128)).to(dtype), (128, 128), torch.float32)
    assert same_bits(again, numbers)
    assert torch.allclose(scales_again, scales, rtol=2 * torch.finfo(dtype).eps, atol=0)
    powers = 2.0 ** torch.randint(-12, 3, scales.shape)
    again, scales_again = quantised(meant(numbers, powers, (128, 128)).to(dtype), (128, 128), torch.float32)
    assert same_bits(again, numbers)
    assert torch.equal(scales_again, powers)


def test_fp8_keeps_zeros_and_tiny_blocks_finite_and_propagates_nan() -> None:
    matrix = torch.zeros(128, 256)
    matrix[3, 200] = float("nan")
    numbers, scales = quantised(matrix, (128, 128), torch.float32)
    tiny, _ = quantised(torch.full((128, 128), 9e-43), (128, 128), torch.float32)
    assert tiny.float().isfinite().all()
    assert scales[0, 0] == 1
    assert not numbers[:, :128].float().any()
    assert numbers[3, 200].float().isnan()


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "glm4", "deepseek-v3"])
@pytest.mark.parametrize(("scale_dtype", "dtype"), [(torch.float32, "bfloat16"), (torch.bfloat16, "float32")])
def test_sent_tensors_have_the_checkpoints_names_dtypes_and_shapes(
    tmp_path: Path, family: str, scale_dtype: torch.dtype, dtype: str
) -> None:
    path = in_fp8(write_tiny(tmp_path / "hf", TINY[family], dtype=dtype), scale_dtype=scale_dtype)
    with one_rank(trainer_settings(path, dtype=dtype, update_weight_buffer_size=8_000)) as rank:
        rank.write_weights(tmp_path / "written")
        buckets = rank.weight_buckets()
    before, written = tensors_of(path), tensors_of(tmp_path / "written")
    assert len(buckets) > 1
    sent = {
        name: (f"torch.{dtype}", shape)
        for bucket in buckets
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True)
    }
    assert sent == {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in before.items()}
    assert written.keys() == before.keys()
    for name, tensor in before.items():
        if name.endswith("_scale_inv"):
            assert torch.allclose(written[name].float(), tensor.float(), rtol=2**-7, atol=0), name
        else:
            assert same_bits(written[name], tensor), name
    assert (tmp_path / "written" / "config.json").read_text() == (path / "config.json").read_text()


@pytest.mark.parametrize("family", TINY)
def test_bytes_are_counted_as_checkpoints_have_them(tmp_path: Path, family: str) -> None:
    path = in_fp8(write_tiny(tmp_path / "hf", TINY[family], dtype="bfloat16"), block=(1, 1), in_full=IN_FULL)
    shape, tensors = read_shape(path), tensors_of(path)
    assert fp8_size(shape).total == sum(tensor.numel() for tensor in tensors.values() if tensor.dtype == E4M3)
    biases = sum(2 * tensor.numel() for name, tensor in tensors.items() if name.endswith("correction_bias"))
    assert sent_bytes(shape, 2) == sum(tensor.nbytes for tensor in tensors.values()) - biases  # which are float32
    assert fp8_size(replace(shape, fp8_block=None)).total == 0


def test_a_snapshot_equals_the_written_checkpoint_byte_by_byte(tmp_path: Path) -> None:
    path = in_fp8(write_checkpoint(tmp_path / "hf", moe=True, dtype="bfloat16"))
    with one_rank(trainer_settings(path, dtype="bfloat16", update_weight_buffer_size=8_000)) as rank:
        rank.train(random_batch())
        rank.write_weights(tmp_path / "written")
        sender = rank._weight_sender  # noqa: SLF001
        flats = sender._new_copies(2).snapshot(rank._model)  # noqa: SLF001
        copies = [flat.clone() for flat in flats]
        gathered = [sender._gathered(weights) for weights in sender._plan]  # noqa: SLF001
        buckets = rank.weight_buckets()
    written = tensors_of(tmp_path / "written")
    for bucket, copied, sent in zip(buckets, copies, gathered, strict=True):
        assert torch.equal(copied, sent)
        assert torch.equal(copied, flatten(written[name] for name in bucket.names))
        assert copied.numel() == bucket.num_bytes
        for name, tensor in zip(bucket.names, views(copied, bucket.dtypes, bucket.shapes), strict=True):
            assert same_bits(tensor, written[name])
    before = tensors_of(path)
    assert any(not same_bits(written[name], tensor) for name, tensor in before.items() if tensor.dtype == E4M3)


def test_a_trained_model_is_saved_without_fp8_and_loads(tmp_path: Path) -> None:
    path = in_fp8(write_checkpoint(tmp_path / "hf", moe=True, dtype="bfloat16"))
    with one_rank(trainer_settings(path, dtype="bfloat16")) as rank:
        rank.train(random_batch())
        rank.save(tmp_path / "saved")
    saved = tensors_of(tmp_path / "saved")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert not [name for name in saved if name.endswith("_scale_inv")]
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


def test_fp8_weights_that_cannot_be_sent_are_refused_in_one_line(tmp_path: Path) -> None:
    path = in_fp8(write_checkpoint(tmp_path / "hf"))
    tensors = tensors_of(path)
    name = "model.layers.0.mlp.up_proj.weight"
    scales = tensors.pop(f"{name}_scale_inv")
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name} in .* is in fp8 and has no _scale_inv"):
        fp8_of(path, read_shape(path))
    odd = {name: torch.zeros(3, 5).to(E4M3), f"{name}_scale_inv": scales}
    save_file({**tensors, **odd}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"cannot send {name} in fp8, it is 3 x 5; only matrices"):
        fp8_of(path, read_shape(path))
