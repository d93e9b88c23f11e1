"""Environments that an episode plays: classes with ``reset`` and ``step``, and the environments of ``verifiers``."""
