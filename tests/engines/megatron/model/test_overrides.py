"""Shape flags against ``config.json``: which value wins, and which programs are told."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from asyncrl.config import ShapeConfig
from asyncrl.errors import ConfigError
from asyncrl.models.overrides import changes, overridden, server_changes
from asyncrl.models.shape import read_config, read_shape, shape_of
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.tiny import one_rank, random_batch, trainer_settings
from tests.engines.megatron.train.test_algorithms import answers
from tests.unit.models.test_shape import DEEPSEEK, QWEN3

OLD = {**QWEN3, "rope_theta": 1e6}
GLM = {**OLD, "architectures": ["Glm4ForCausalLM"]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CONFIGS = {
    "transformers 4": OLD,
    "transformers 5": {**QWEN3, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    "both": {**OLD, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    "stretched": {**OLD, "architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "theta within scaling": {
        **QWEN3,
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": {"rope_type": "llama3", "rope_theta": 1e6, **LLAMA3},
    },
    "partial": {**GLM, "partial_rotary_factor": 0.5},
    "partial by default": GLM,
    "partial within": {**GLM, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
}
FREE = ShapeConfig(rotary_base=5e5, norm_epsilon=1e-3, max_position_embeddings=1024)


def test_shape_flags_equal_to_config_json_change_nothing() -> None:
    again: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
    }
    again |= {"kv_channels": 16, "max_position_embeddings": 512, "rotary_base": 1e6, "rotary_percent": 1.0}
    assert overridden(shape_of(OLD), ShapeConfig(**again, norm_epsilon=1e-6)) == shape_of(OLD)
    assert overridden(shape_of(OLD), ShapeConfig()) == shape_of(OLD)
    assert overridden(shape_of({**OLD, **DEEPSEEK}), ShapeConfig(kv_channels=128)).num_heads == 128
    assert overridden(shape_of({**OLD, **DEEPSEEK}), ShapeConfig(kv_channels=64)).num_heads == 128  # Kimi K2's scripts
    with pytest.raises(ConfigError, match=r"kv-channels 32: config\.json says 128"):
        overridden(shape_of({**OLD, **DEEPSEEK}), ShapeConfig(kv_channels=32))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_shape_flags_override_config_json_and_the_changed_file_reads_back(config: dict[str, Any]) -> None:
    shape = overridden(shape_of(config), FREE)
    assert (shape.rope.theta, shape.norm_eps, shape.max_positions) == (5e5, 1e-3, 1024)
    assert shape.rope.scaling == shape_of(config).rope.scaling
    assert shape_of({**config, **changes(config, shape)}) == shape
    assert changes(config, shape_of(config)) == server_changes(config, shape_of(config)) == {}


@pytest.mark.parametrize("name", ["partial", "partial by default", "partial within"])
def test_rotary_percent_can_be_overridden_where_the_model_has_it(name: str) -> None:
    config = CONFIGS[name]
    shape = overridden(shape_of(config), ShapeConfig(rotary_percent=0.25))
    assert (shape.rope.fraction, shape.rope.theta) == (0.25, 1e6)
    assert shape_of({**config, **changes(config, shape)}) == shape


@pytest.mark.parametrize(
    ("config", "given", "lines"),
    [
        (
            OLD,
            {"num_layers": 36, "kv_channels": 128, "rotary_base": 5.0},
            [
                "num-layers 36: config.json says 2, and the checkpoint's tensors have that size",
                "kv-channels 128: config.json says 16, and the checkpoint's tensors have that size",
            ],
        ),
        (
            OLD,
            {"num_query_groups": 4},
            ["num-query-groups 4: config.json says 2, and the checkpoint's tensors have that size"],
        ),
        (
            OLD,
            {"rotary_percent": 0.5},
            ["rotary-percent 0.5: config.json says 1.0: Qwen3ForCausalLM always rotates whole heads"],
        ),
        (
            {**OLD, **DEEPSEEK},
            {"norm_epsilon": 1e-5},
            [
                "norm-epsilon 1e-05: config.json says 1e-06, and engines would also use it within latent attention, "
                "where the trainer does not"
            ],
        ),
    ],
)  # fmt: skip
def test_shape_flags_that_contradict_the_tensors_are_refused_with_both_numbers(
    config: dict[str, Any], given: dict[str, Any], lines: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        overridden(shape_of(config), ShapeConfig(**given))
    assert str(error.value).split("\n") == lines


@pytest.mark.parametrize("name", ["qwen3", "llama3", "glm4", "deepseek-v3"])
def test_engines_get_shape_flags_under_the_names_of_transformers(tmp_path: Path, name: str) -> None:
    """SGLang sets the attributes in its flag on the configuration that transformers has read."""
    folder = write_tiny(tmp_path, TINY[name])
    for config in (read_config(folder), in_the_old_format(read_config(folder))):
        (folder / "config.json").write_text(json.dumps(config))
        shape = overridden(read_shape(folder), ShapeConfig(rotary_base=77.0, max_position_embeddings=600))
        read = transformers.AutoConfig.from_pretrained(folder)
        before = dict(read.rope_parameters)
        read.update(json.loads(json.dumps(server_changes(config, shape))))
        assert read.rope_parameters == {**before, "rope_theta": 77.0}
        assert read.max_position_embeddings == 600


def in_the_old_format(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.pop("rope_parameters")
    theta, kind, share = rope.pop("rope_theta"), rope.pop("rope_type"), rope.pop("partial_rotary_factor", None)
    return {
        **config,
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {**rope, "type": kind},
        **({} if share is None else {"partial_rotary_factor": share}),
    }


def test_the_trainer_computes_with_shape_flags_and_saves_them(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "glm4", TINY["glm4"])
    given = ShapeConfig(rotary_base=50.0, rotary_percent=0.25, norm_epsilon=0.1)
    settings = trainer_settings(folder, lr=1e-30, shape=given)
    batch = random_batch()
    with one_rank(settings) as rank:
        logprobs = rank.train(batch).logprobs
        rank.save(tmp_path / "saved")
    expected = {}
    for name in ("glm4", "saved"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        with torch.no_grad():
            expected[name], _ = answers(model, batch)
    for mine, saved, first in zip(logprobs, expected["saved"], expected["glm4"], strict=True):
        assert list(mine) == pytest.approx(saved.tolist(), abs=1e-4)
        assert list(mine) != pytest.approx(first.tolist(), abs=1e-2)
    assert read_shape(tmp_path / "saved") == overridden(read_shape(folder), given)
    assert overridden(read_shape(tmp_path / "saved"), given) == read_shape(tmp_path / "saved")


@pytest.mark.parametrize("kind", ["ref_load", "critic"])
def test_shape_flags_apply_to_the_reference_and_the_critic(tmp_path: Path, kind: str) -> None:
    folder = write_tiny(tmp_path / "qwen3", TINY["qwen3"])
    changes = {"use_kl_loss": True, "kl_loss_type": "k3"} if kind == "ref_load" else {"advantage_estimator": "ppo"}
    with one_rank(trainer_settings(folder, shape=ShapeConfig(rotary_base=50.0), **changes)) as rank:
        report = rank.train(random_batch())
        if kind == "ref_load":
            assert report.metrics["train/kl"] == pytest.approx(0.0, abs=1e-9)
        else:
            assert rank._critic is not None  # noqa: SLF001
            assert rank._critic.learner.model.rotary_angles.keywords["frequencies_F"][1] == pytest.approx(  # noqa: SLF001
                rank._model.rotary_angles.keywords["frequencies_F"][1].item()  # noqa: SLF001
            )
