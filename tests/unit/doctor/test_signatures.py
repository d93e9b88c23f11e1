"""The doctor reads the signature of a function that generates samples, without importing its file."""

import ast

import pytest

from asyncrl.doctor.signatures import signature_line

FLAG = "custom-generate-function-path"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("async def f(ep): pass", None),
        ("async def f(args, sample, sampling_params): pass", None),
        ("async def f(args, sample: Sample, sampling_params, evaluation=False) -> Sample: pass", None),
        ("async def f(args, samples, evaluation=False): pass", None),
        ("class f: pass", None),
        ("def f(ep): pass", "line 1: 'f' must be written with 'async def', not 'def'"),
        ("async def f(a, b): pass", "line 1: 'f' must take (ep), takes (a, b)"),
        ("g = 1", "has no function 'f'"),
    ],
)
def test_shapes_of_generate_functions(code: str, line: str | None) -> None:
    assert signature_line(FLAG, ast.parse(code), "f") == line
