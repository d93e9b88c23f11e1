"""All groups of gloo in a process use one device."""

from typing import Any

import torch
import torch.distributed as dist

from tests.engines.megatron.layouts import processes
from tests.engines.megatron.tiny import free_port


def device_of(group: dist.ProcessGroup | None = None) -> object:
    backend: Any = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]  # noqa: SLF001
    (device,) = backend.options._devices  # noqa: SLF001
    return device


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
