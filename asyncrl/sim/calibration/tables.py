"""Calibrations as TOML text."""

from collections.abc import Mapping

type Value = float | bool | tuple[tuple[float, float], ...]


def as_toml(about: str, tables: Mapping[str, Mapping[str, Value]]) -> str:
    """The text for ``--calibration``: one table for each area, ``about`` as a comment above them."""
    return f"# {about}\n" + "".join(
        f"\n[{area}]\n" + "".join(f"{name} = {_value(value)}\n" for name, value in fields.items())
        for area, fields in tables.items()
    )


def _value(value: Value) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(f"[{first:g}, {second:.6g}]" for first, second in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else format(value, ".6g")
