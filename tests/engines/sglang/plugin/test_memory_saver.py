"""SGLang's memory saver together with Megatron, in a process like SGLang's."""

import os
import subprocess
import sys

import pytest

from asyncrl.engines.sglang.labels import SAVES_GRAPHS

MODE = "print(saver._impl_ctor_kwargs.get('hook_mode'))"
PROGRAM = f"""
from torch_memory_saver import torch_memory_saver as saver
import sglang.srt.debug_utils.dumper
{MODE}
from sglang.srt.plugins import load_plugins
load_plugins()
{MODE}
"""


@pytest.mark.timeout(900)
def test_cuda_graphs_can_be_offloaded_where_megatron_is_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**os.environ, SAVES_GRAPHS: "true"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    before, after = (line for line in done.stdout.splitlines() if line in ("None", "torch", "preload"))
    assert before == "torch", "Megatron changes it no more: the plug-in can go"
    assert after == "preload"
