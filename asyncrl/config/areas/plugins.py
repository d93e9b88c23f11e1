"""The arguments of user functions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """The arguments of user functions."""

    custom_config_path: Annotated[
        Path | None,
        "YAML file of one mapping. A key that is a setting replaces its value, flags included; any other key becomes "
        "an attribute of args in user functions with slime's signatures.",
    ] = None
