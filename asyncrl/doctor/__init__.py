"""The translation of slime's launch scripts; see ``python -m asyncrl.doctor --help``."""
