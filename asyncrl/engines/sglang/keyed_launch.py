"""Start SGLang's server or router with an API key that is on no command line and in no environment.

    python -m asyncrl.engines.sglang.keyed_launch sglang.launch_server [FLAG...]        with the key on standard input
    python -m asyncrl.engines.sglang.keyed_launch sglang_router.launch_router [FLAG...]

Every user of a machine can read the command lines of its processes, and children inherit an environment.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from asyncrl.internals import Internal, check_internals
from asyncrl.quick_imports import cpu_imports, quick_imports

_THIS = "asyncrl.engines.sglang.keyed_launch"  # ``__name__`` is ``__main__`` here

INTERNALS = (
    Internal(name="sglang.launch_server.run_server", parameters=("server_args",), used_in=_THIS),
    Internal(name="sglang.srt.plugins.load_plugins", used_in=_THIS),
    Internal(name="sglang.srt.server_args.prepare_server_args", parameters=("argv",), is_exact=True, used_in=_THIS),
    Internal(name="sglang.srt.server_args.ServerArgs", attributes=("api_key",), used_in=_THIS),
    Internal(
        name="sglang.srt.utils.kill_process_tree",
        parameters=("parent_pid",),
        keywords=("include_parent",),
        used_in=_THIS,
    ),
)
"""Names that may change with the library: see docs/internals.md."""

SERVER, ROUTER = "sglang.launch_server", "sglang_router.launch_router"
UNUSED_ON_CPU = ("flashinfer", "megatron", "scipy", "torchao")
"""Libraries that SGLang and transformers import if they can, and that a server without a GPU does not use.

They take 4 of 14 s of CPU time.
"""


class HiddenKey(str):
    """A key that reads ``***`` in logs, in copies and in other processes, and is itself only where it is compared.

    SGLang logs its arguments, pickles them for its schedulers, and copies them into the answer to ``/server_info``.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"

    def __reduce_ex__(self, protocol: Any, /) -> tuple[type[str], tuple[str]]:
        return str, ("***",)


def main(argv: Sequence[str]) -> None:
    """Start the program ``argv[0]`` with the flags behind it and the key on standard input; return when it ends."""
    program, *flags = argv
    start: Callable[[list[str], str], None] = {SERVER: _serve, ROUTER: _route}[program]
    start(flags, _read_key())


def _read_key() -> str:
    """Return the first line of standard input, which is empty afterwards for the program and its children."""
    key = sys.stdin.readline().strip()
    if not key:
        sys.exit("error: no key came on standard input")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    return key


def _serve(flags: list[str], key: str) -> None:
    """Do what ``python -m sglang.launch_server`` does."""
    has_no_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    with cpu_imports(*UNUSED_ON_CPU) if has_no_gpu else quick_imports():
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

        check_internals(INTERNALS)
        load_plugins()
        server_args = prepare_server_args(flags)
        server_args.api_key = HiddenKey(key)
        import_module("sglang.srt.entrypoints.http_server")  # most of sglang; run_server would import it next
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _route(flags: list[str], key: str) -> None:
    """Do what ``python -m sglang_router.launch_router`` does, without its optional import of sglang.

    The router is a Rust program, but its launcher imports all of sglang for tracing if it can.  A start takes 2 s
    without the import and 20 s with it.
    """
    sys.modules["sglang"] = None  # type: ignore[assignment]  # makes the import fail
    from sglang_router.launch_router import launch_router, parse_router_args

    router_args = parse_router_args(flags)
    router_args.api_key = key
    launch_router(router_args)


if __name__ == "__main__":
    main(sys.argv[1:])
