"""Tests of this folder run Megatron in their own process."""

from pathlib import Path

import pytest

from tests.with_megatron import few_threads, ignore_warnings_of_megatron, import_megatron

__all__ = ["few_threads"]

import_megatron()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ignore_warnings_of_megatron(items, Path(__file__).parent)
