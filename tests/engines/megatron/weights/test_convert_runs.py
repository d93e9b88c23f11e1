"""The checkpoints of runs convert to Hugging Face folders."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config import ShapeConfig
from asyncrl.engines.megatron.weights.conversion import to_hf
from asyncrl.errors import ConfigError
from asyncrl.models.shape import read_shape
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.tiny import one_rank, random_batch, trainer_settings
from tests.save_targets import target as target_of

pytestmark = pytest.mark.filterwarnings("ignore:::torch")  # torch warns about calls by Megatron

OTHERWISE = ShapeConfig(rotary_base=5e5, norm_epsilon=1e-3, max_position_embeddings=256, rotary_percent=0.25)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_converting_a_run_with_shape_flags_equals_saving_it(tmp_path: Path, dtype: str) -> None:
    hf = write_tiny(tmp_path / "hf", TINY["glm4.5"], dtype=dtype)
    with one_rank(trainer_settings(hf, dtype=dtype, shape=OTHERWISE)) as rank:
        rank.train(random_batch())
        rank.begin_checkpoint(target_of(tmp_path / "run", 1), {"step": 1}, with_optimizer=True)
        rank.finish_checkpoint()
        rank.save(tmp_path / "saved")
        to_hf(tmp_path / "run", tmp_path / "back", hf)
        with pytest.raises(ConfigError, match="is of another model than hf-checkpoint"):
            to_hf(tmp_path / "run", tmp_path / "other", write_tiny(tmp_path / "hf2", TINY["glm4.5-air"]))
    ours, theirs = tensors_of(tmp_path / "back"), tensors_of(tmp_path / "saved")
    assert ours.keys() == theirs.keys() == tensors_of(hf).keys()
    assert all(ours[name].equal(theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)
    assert not all(ours[name].equal(tensor) for name, tensor in tensors_of(hf).items())  # it was trained
    assert (tmp_path / "back" / "config.json").read_text() == (tmp_path / "saved" / "config.json").read_text()
    assert read_shape(tmp_path / "back").rope.theta == 5e5


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
