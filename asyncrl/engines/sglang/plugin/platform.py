"""Lets stock SGLang serve on a CPU: its out-of-tree platform, entry-point group ``sglang.srt.platforms``.

SGLang imports this in each process that it starts anew; nothing else does.  ``activate`` stays cheap because SGLang
calls it on every machine, also where there are GPUs and it has nothing to offer.
"""

import importlib.util
import os


def activate() -> str | None:
    """Where the platform is defined, or None on a machine with CUDA."""
    return None if _has_cuda() else "asyncrl.engines.sglang.plugin.cpu_platform:CpuPlatform"


def _has_cuda() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or importlib.util.find_spec("torch") is None:
        return False
    import torch  # SGLang has imported it already

    return bool(torch.cuda.is_available())
