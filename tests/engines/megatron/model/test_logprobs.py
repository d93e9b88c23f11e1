"""The log-prob head: plain, in Triton's interpreter, and on a GPU."""

import json
import os
import subprocess
from collections.abc import Iterator

import pytest
import torch

from asyncrl.engines.megatron.model import logprobs
from asyncrl.engines.megatron.model.logprobs import token_logprobs
from tests.engines.megatron.model import heads
from tests.programs import ROOT, program


@pytest.fixture
def small_chunks() -> Iterator[None]:
    """Chunks of five tokens of a vocabulary of 50."""
    whole = logprobs.CHUNK_BYTES
    logprobs.CHUNK_BYTES = 4 * 50 * 5
    yield
    logprobs.CHUNK_BYTES = whole


@pytest.mark.usefixtures("small_chunks")
def test_plain_results_and_gradients_are_those_of_autograd_over_all_logits() -> None:
    apart, relative = heads.differences(50, torch.float32, "cpu", is_fused=False)
    assert apart < 5e-6
    assert relative < 2e-6


def test_float32_and_cpus_take_the_plain_path() -> None:
    assert heads.differences(50, torch.float32, "cpu", is_fused=None) == heads.differences(
        50, torch.float32, "cpu", is_fused=False
    )


def test_without_tokens_there_are_no_results() -> None:
    hidden, weight, targets, _ = heads.inputs(50, torch.float32)
    found = token_logprobs(hidden[:0], weight, targets[:0], 1.0)
    assert (len(found.logprobs_R), len(found.entropies_R), found.further_N) == (0, 0, None)
    (slope,) = torch.autograd.grad(found.logprobs_R.sum(), weight)
    assert not slope.any()


def test_a_single_kept_id_has_probability_one() -> None:
    hidden, weight, targets, _ = heads.inputs(50, torch.float32)
    further = logprobs.FurtherIds(counts_R=heads.COUNTS * 0 + 1, ids_N=targets)
    found = token_logprobs(hidden, weight, targets, 1.0, further=further)
    assert found.further_N is not None
    over, entropies, mass = logprobs.over_kept_ids(found, found.further_N, further.rows_N)
    assert not over.any()
    assert not entropies.any()
    torch.testing.assert_close(mass, found.logprobs_R)


@pytest.mark.timeout(900)
def test_the_kernels_compute_the_same() -> None:
    done = subprocess.run(
        program(heads.__name__),
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=840,
    )
    found = json.loads(done.stdout)
    assert len(found) == 4
    for name, (apart, relative) in found.items():
        exact = name.endswith("float32")
        assert apart < (1e-5 if exact else 0.03), name  # logits of bfloat16 have errors of 2**-8
        assert relative < (3e-6 if exact else 0.01), name


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [50, 5_000, 151_936])
@pytest.mark.parametrize("is_fused", [False, True])
def test_results_on_a_gpu_are_exact_but_for_the_rounding_of_bfloat16(vocabulary: int, is_fused: bool) -> None:
    apart, relative = heads.differences(vocabulary, torch.bfloat16, "cuda", is_fused=is_fused)
    assert apart < 0.03
    assert relative < 0.01
