"""A plug-in of stock SGLang: the memory of CUDA graphs can be released even if Megatron is installed.

SGLang's dumper imports megatron-core if it can.  There ``inference.contexts.dynamic_context`` (0.19) sets the process's
only memory saver to the mode without CUDA graphs, and SGLang then dies in its first capture.
"""

import importlib
import logging
import os

from asyncrl.engines.sglang.labels import SAVES_GRAPHS
from asyncrl.engines.sglang.plugin.activation import note_and_answer
from asyncrl.internals import Internal, unlike

INTERNALS = (
    Internal(name="sglang.srt.debug_utils.dumper", used_in=__name__),
    Internal(name="torch_memory_saver.torch_memory_saver", used_in=__name__),
    Internal(name="torch_memory_saver.entrypoint.TorchMemorySaver", attributes=("hook_mode",), used_in=__name__),
)
"""Names that may change with the library: see docs/internals.md."""

logger = logging.getLogger(__name__)


def activate() -> None:
    """Set the memory saver to the mode that SGLang expects, before anything is allocated in it.

    SGLang calls this in each process that it spawns.
    """
    if os.environ.get(SAVES_GRAPHS) == "true":
        if (difference := unlike(INTERNALS)) is not None:
            logger.warning(
                "asyncrl: the memory of CUDA graphs may not be released, and their capture may fail (%s)", difference
            )
            note_and_answer("memory_saver", f"this SGLang is unlike 0.5.16 inside ({difference})")
            return
        _save_graphs()
    note_and_answer("memory_saver")


def _save_graphs() -> None:
    importlib.import_module("sglang.srt.debug_utils.dumper")  # first, because a later import would reset the mode
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver.hook_mode = "preload"
