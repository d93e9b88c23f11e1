"""All groups of gloo in a process use one device, and have one time limit."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tests.engines.megatron.layouts import processes
from tests.engines.megatron.tiny import free_port, one_rank, trainer_settings, write_checkpoint


def options_of(group: dist.ProcessGroup | None = None) -> Any:
    backend: Any = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]  # noqa: SLF001
    return backend.options


def device_of(group: dist.ProcessGroup | None = None) -> object:
    (device,) = options_of(group)._devices  # noqa: SLF001
    return device


def test_every_group_has_the_time_limit_of_the_run(tmp_path: Path) -> None:
    """Megatron's default is 30 minutes, and that of asyncrl is 10."""
    settings = replace(trainer_settings(write_checkpoint(tmp_path / "hf")), timeout_s=120.0)
    with one_rank(settings):
        groups = (
            None,
            parallel_state.get_data_parallel_group(),
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        )
        assert {options_of(group)._timeout for group in groups} == {timedelta(minutes=2)}  # noqa: SLF001


def test_every_group_uses_the_device_of_the_first_one() -> None:
    with processes(0, 1, free_port()):
        groups = [dist.new_group([0]) for _ in range(3)]
        assert {id(device_of(group)) for group in groups} == {id(device_of())}
        first = device_of()
        total = torch.ones(1)
        dist.all_reduce(total, group=groups[0])
        assert total.item() == 1.0
    with processes(0, 1, free_port()):
        assert device_of() is first
