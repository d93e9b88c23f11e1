"""Kept ids of a real SGLang server with a mixture of experts are those of transformers."""

import asyncio
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.generation import PROMPT, answers, ask
from tests.sglang_server import Servers, open_sglang, start_servers
from tests.tiny_model import tiny_mixture

pytestmark = [pytest.mark.timeout(360), pytest.mark.filterwarnings("ignore::SyntaxWarning")]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A server whose model is a mixture of experts."""
    with start_servers(tmp_path_factory.mktemp("mixture"), tiny_mixture) as servers:
        yield servers


def logits_of(model: Path, token_ids: tuple[int, ...]) -> NDArray[np.float64]:
    """The logits that transformers computes at each position."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import AutoModelForCausalLM

        network = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        found: Any = network(torch.tensor([token_ids])).logits[0].double().numpy()
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(("top_p", "top_k", "min_p"), [(0.9, -1, 0.0), (1.0, 20, 0.0), (0.9, 20, 0.0), (1.0, -1, 0.3)])
def test_log_probs_are_over_the_ids_that_were_kept(mixture: Servers, top_p: float, top_k: int, min_p: float) -> None:
    async def run() -> None:
        async with open_sglang(mixture) as place:
            limits: dict[str, Any] = {"top_p": top_p, "top_k": top_k, "extra": {"min_p": min_p} if min_p else {}}
            requests = [replace(ask(place, seed, 60 + seed, **limits), returns_kept=True) for seed in range(3)]
            for one in await answers(place.engine, requests):
                logits = logits_of(mixture.model, PROMPT + one.token_ids)[len(PROMPT) - 1 : -1]
                kept = [
                    chunk.kept.part(place, place + 1).ids_I
                    for chunk in one.chunks
                    if chunk.kept
                    for place in range(len(chunk.kept))
                ]
                assert len(kept) == len(one.token_ids)
                for token, logprob, ids, row in zip(one.token_ids, one.logprobs, kept, logits, strict=True):
                    over_kept = row[token] - np.log(np.exp(row[ids]).sum())
                    assert logprob == pytest.approx(over_kept, abs=1e-4)
                    assert_kept(row, ids, token, top_p, top_k, min_p)

    asyncio.run(run())


def assert_kept(
    logits: NDArray[np.float64], ids: NDArray[np.int32], token: int, top_p: float, top_k: int, min_p: float
) -> None:
    """Assert that ``ids`` are the likeliest ones, as many as the limits keep, but for rounding."""
    probs = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    assert token in ids
    ordered = np.sort(probs)[::-1]
    assert np.sort(probs[ids])[::-1] == pytest.approx(ordered[: len(ids)], abs=1e-5)
    before = ordered.cumsum() - ordered
    keeps = (before <= top_p) & (ordered >= min_p * ordered[0])
    keeps[top_k if top_k > 0 else len(ordered) :] = False
    is_near = (abs(before - top_p) < 1e-5) & (top_p < 1) | (abs(ordered - min_p * ordered[0]) < 1e-6) & (min_p > 0)
    assert keeps.sum() == len(ids) or is_near.any()
    assert len(ids) < len(ordered)
