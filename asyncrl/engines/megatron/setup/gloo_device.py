"""One device of gloo for all groups of a process, instead of one for each group.

A device is a thread that looks at its sockets 100 times a second, also while nothing is sent.  A rank has some forty
groups, whose threads took 5 % of a processor.
"""

from datetime import timedelta

from torch.distributed import distributed_c10d

from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="torch.distributed.distributed_c10d.ProcessGroupGloo",
        attributes=("_Options", "create_default_device"),
        used_in=__name__,
    ),
    Internal(name="torch._C._distributed_c10d.ProcessGroupGloo._Options", attributes=("_devices",), used_in=__name__),
    Internal(
        name="torch.distributed.distributed_c10d._new_process_group_helper",
        attributes=("ProcessGroupGloo",),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""

_Gloo = distributed_c10d.ProcessGroupGloo


class GlooOnOneDevice(_Gloo):
    """The group with the arguments that torch gives it, on the device of this process."""

    _device: "_Gloo.Device | None" = None

    def __init__(self, store: distributed_c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Join the group.  The first one of a process makes the device, at the address that torch would choose."""
        if GlooOnOneDevice._device is None:
            GlooOnOneDevice._device = _Gloo.create_default_device()
        options = _Gloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        options._devices = [GlooOnOneDevice._device]  # noqa: SLF001
        options._timeout = timeout  # noqa: SLF001
        super().__init__(store, rank, size, options)


def share_gloo_device() -> None:
    """Have every later group of this process use one device.  A second call changes nothing."""
    # Invariant: torch looks the class up in this module whenever it makes a group.  The patch is never undone; it lasts
    # until the process ends.
    distributed_c10d.ProcessGroupGloo = GlooOnOneDevice  # type: ignore[misc]
