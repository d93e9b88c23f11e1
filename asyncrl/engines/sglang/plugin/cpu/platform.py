"""The out-of-tree platform by which stock SGLang serves on a CPU, entry-point group ``sglang.srt.platforms``.

SGLang imports this module in each process that it spawns; nothing else does.  ``activate`` must be cheap: SGLang also
calls it on machines with GPUs, where it offers no platform.
"""

import importlib.util
import os


def activate() -> str | None:
    """Return the import path of the platform, or None on a machine with CUDA."""
    return None if _has_cuda() else "asyncrl.engines.sglang.plugin.cpu.cpu_platform:CpuPlatform"


def _has_cuda() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or importlib.util.find_spec("torch") is None:
        return False
    import torch  # SGLang has imported it already

    return bool(torch.cuda.is_available())
