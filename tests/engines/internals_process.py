"""Import every module that registers internals, and report how the installed packages differ.

Writes JSON: the registered names, our modules, the line on differences, if any, and the classes of SGLang's models, as
our plug-in and SGLang find them.  Runs in a separate process,
because importing SGLang and Megatron takes seconds, warns, and changes torch.

    python -m tests.engines.internals_process

Started by its path, it would import the folders ``megatron`` and ``sglang`` next to it.
"""

import ast
import importlib
import json
import os
import sys
import warnings
from pathlib import Path

MODELS = "sglang.srt.models"
ROOT = Path(__file__).parents[2]


def modules() -> list[str]:
    """Our modules that have a table ``INTERNALS``."""
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "asyncrl").rglob("*.py"))
        if any(
            isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "INTERNALS"
            for node in ast.parse(path.read_text()).body
        )
    ]


def main() -> None:
    """Print the names, the modules and the differences."""
    warnings.simplefilter("ignore")
    from asyncrl.engines.sglang.plugin import model_classes
    from asyncrl.internals import unlike

    model_classes.activate()
    lazy = importlib.import_module(f"{MODELS}.registry").ModelRegistry
    asked = lazy.resolve_model_cls(["LlamaForCausalLM"])[0].__module__
    imported = sorted(name for name in sys.modules if name.startswith(f"{MODELS}."))
    del sys.modules[f"{MODELS}.registry"]  # as SGLang has it
    registry = importlib.import_module(f"{MODELS}.registry").ModelRegistry
    tables = {name: importlib.import_module(name).INTERNALS for name in modules()}
    found = {
        "names": sorted({each.name for table in tables.values() for each in table}),
        "used_in": sorted({each.used_in for table in tables.values() for each in table}),
        "tables": list(tables),
        "unlike": unlike(*tables.values()),
        "kind": type(lazy.models).__name__,
        "disabled": os.environ.get("SGLANG_DISABLED_MODEL_ARCHS"),
        "asked": asked,
        "imported": imported,
        "lazy": {name: each.__module__ for name, each in lazy.models.items()},
        "classes": {name: each.__module__ for name, each in registry.models.items()},
    }
    sys.stdout.write("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
