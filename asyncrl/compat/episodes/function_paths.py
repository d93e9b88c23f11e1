"""The function that a path to a file alone means, as in ``--custom-generate-function-path custom_generate.py``."""

import ast
import sys
from pathlib import Path

from asyncrl.errors import PluginError

PREFERRED = ("custom_generate", "generate")
"""Names of the function, in order of preference."""


def function_path(path: str) -> str:
    """Return ``file.py:function`` for ``file.py``; any other path unchanged.

    The folder of a file is searched for modules, after all others, so that it can import its neighbours.  Raises
    PluginError if the file has no such function, or several.
    """
    file = Path(path.partition(":")[0]).expanduser()
    if file.suffix != ".py":
        return path
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return path if ":" in path else f"{path}:{_function(file)}"


def _function(file: Path) -> str:
    try:
        tree = ast.parse(file.read_bytes())
    except FileNotFoundError:
        raise PluginError(f"no such file: {file.resolve()}") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise PluginError(f"{file}: {type(error).__name__}: {error}") from error
    named = [node.name for node in tree.body if isinstance(node, ast.AsyncFunctionDef) and _has_args(node)]
    preferred = [name for name in (*PREFERRED, file.stem) if name in named]
    public = [name for name in named if not name.startswith("_")]
    if preferred or len(public) == 1:
        return (preferred or public)[0]
    has = f"it has: {', '.join(public)}" if public else "it has none that is written with 'async def' and takes args"
    raise PluginError(f"names no function; write {file}:function; {has}")


def _has_args(node: ast.AsyncFunctionDef) -> bool:
    first = (*node.args.posonlyargs, *node.args.args)[:1]
    return bool(first) and first[0].arg == "args"
