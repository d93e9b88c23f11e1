"""Import every module that registers internals, and report how the installed packages differ.

Writes JSON: the registered names, our modules, the line on differences, if any, and the classes of SGLang's models, as
our plug-in finds them in the sources and as SGLang imports them.  Runs in a separate process,
because importing SGLang and Megatron takes seconds, warns, and changes torch.

    python -m tests.engines.internals_process

Started by its path, it would import the folders ``megatron`` and ``sglang`` next to it.
"""

import ast
import importlib
import json
import sys
import warnings
from pathlib import Path

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
    from sglang.srt.models import registry

    from asyncrl.engines.sglang.plugin.model_classes import entries
    from asyncrl.internals import unlike

    tables = {name: importlib.import_module(name).INTERNALS for name in modules()}
    found = {
        "names": sorted({each.name for table in tables.values() for each in table}),
        "used_in": sorted({each.used_in for table in tables.values() for each in table}),
        "tables": list(tables),
        "unlike": unlike(*tables.values()),
        "entries": list(entries("sglang.srt.models").items()),
        "classes": [(name, each.__module__) for name, each in registry.ModelRegistry.models.items()],
    }
    sys.stdout.write("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
