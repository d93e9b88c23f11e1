"""A user's advantage and loss functions in the real trainer, and the errors of wrong ones."""

import json
import math
import pickle
import subprocess
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from asyncrl.algorithms.custom_functions import Custom, StepSamples
from asyncrl.algorithms.losses import ppo_clip
from asyncrl.compat import SlimeArgs
from asyncrl.engines.megatron.model.packing import examples_of
from asyncrl.engines.megatron.train.custom_advantage import custom_advantages
from asyncrl.engines.megatron.train.custom_loss import CheckedLoss
from asyncrl.engines.megatron.train.sample_advantages import outcomes_of
from asyncrl.errors import NonFiniteLoss, PluginError, TrainerFailed
from asyncrl.plugins import load_custom
from asyncrl.token_columns import Routes
from tests.declared_metrics import is_declared
from tests.engines.megatron.tiny import free_port, one_rank, random_batch, trainer_settings, write_checkpoint
from tests.engines.megatron.train import custom_process
from tests.engines.megatron.train.custom_process import BY_PATH, BY_TOKEN, OURS, SLIMES, TOUCHY, run
from tests.forks import Fork

DEADLINE_S = 360
"""Limit for a process that imports Megatron, which takes 10 to 50 s on two shared cores."""

CODE = """
import torch
import torch.distributed as dist
from asyncrl.algorithms.advantages import group_normalised
from asyncrl.algorithms.losses import ppo_clip

def grpo(samples):
    return group_normalised(samples.rewards_N, samples.groups_N)

def grpo_by_token(samples):
    advantages_N = group_normalised(samples.rewards_N, samples.groups_N)
    return [torch.where(mask, advantage, torch.nan) for advantage, mask in zip(advantages_N, samples.masks)]

def slimes(args, rollout_data):
    assert args.lr == 1.0
    rollout_data["advantages"] = rollout_data["returns"] = [
        torch.full((length,), reward, dtype=torch.float64)
        for reward, length in zip(rollout_data["rewards"], rollout_data["response_lengths"])
    ]

def clipped(eps):
    def loss(logprobs, old_logprobs, advantages, mask, lengths):
        losses, is_clipped = ppo_clip(logprobs, old_logprobs, advantages, mask, eps_low=eps, eps_high=eps)
        return losses, {"clip_fraction": is_clipped}
    return loss

def squared(logprobs, old_logprobs, advantages, mask, lengths):
    ratio = (logprobs - old_logprobs).exp()
    return -ratio * advantages + (ratio - 1) ** 2, {"ratio": ratio}

def touchy(logprobs, old_logprobs, advantages, mask, lengths):
    losses, is_clipped = ppo_clip(logprobs, old_logprobs, advantages, mask, eps_low=0.2, eps_high=0.2)
    fault = old_logprobs.min().item() if dist.is_initialized() and dist.get_rank() == 1 else 0.0
    if fault == -21.0:
        raise LookupError("no such thing")
    if fault == -22.0:
        losses = losses.sum()
    if fault == -23.0:
        losses = losses / 0.0
    if fault == -24.0:
        ratio = (logprobs - logprobs.detach()).exp()
        losses = -ratio * advantages
        ratio += 1.0
    return losses, {"clip_fraction": is_clipped}
"""
Pairs = dict[str, tuple[dict[str, Any], dict[str, Any]]]
"""The results of ``run`` on each of two ranks, by layout."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mine") / "my_algorithms.py"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize("against_rollout", [False, True])
@pytest.mark.parametrize("names", [BY_PATH, BY_TOKEN, SLIMES])
def test_our_own_algorithms_by_path_give_the_same_bits(
    checkpoint: Path, file: Path, names: tuple[str | None, str | None], against_rollout: bool
) -> None:
    ours, by_path = (
        run(0, 1, checkpoint, file, free_port(), each, use_rollout_logprobs=against_rollout)["steps"]
        for each in (OURS, names)
    )
    assert by_path == ours
    assert ours[1][1] != ours[0][1]


@pytest.fixture(scope="module")
def alone_steps(checkpoint: Path, file: Path) -> list[Any]:
    steps: list[Any] = run(0, 1, checkpoint, file, free_port(), OURS)["steps"]
    return steps


@pytest.fixture(scope="module")
def pairs(checkpoint: Path, file: Path, alone_steps: list[Any]) -> Pairs:
    """The results of both ranks: by layout with the user's functions, and with ours under data parallelism.

    ``alone_steps`` is requested first, because it leaves its process group.
    """
    cases: dict[str, dict[str, Any]] = {
        name: {"port": free_port(), "names": TOUCHY, "parallel": sizes} for name, sizes in LAYOUTS.items()
    }
    cases["ours"] = {"port": free_port(), "names": OURS}
    words = (checkpoint, file, json.dumps(list(cases.values())))
    with Fork(custom_process.__name__, *words, stdout=subprocess.PIPE) as other:
        try:
            mine = [run(0, 2, checkpoint, file, **case) for case in cases.values()]
            theirs = json.loads(other.communicate(timeout=DEADLINE_S)[0].splitlines()[-1])
        finally:
            other.kill()
    return dict(zip(cases, zip(mine, theirs, strict=True), strict=True))


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_in_any_layout_do_what_one_does(pairs: Pairs, alone_steps: list[Any], layout: str) -> None:
    mine, theirs = pairs[layout]
    assert [step[:5] for step in theirs["steps"]] == [step[:5] for step in mine["steps"]]
    for step, expected in zip(mine["steps"], alone_steps, strict=True):
        *numbers, metrics, logprobs = step
        *expected_numbers, expected_metrics, expected_logprobs = expected
        assert numbers == pytest.approx(expected_numbers, rel=1e-5, abs=1e-6)
        assert metrics == pytest.approx(expected_metrics, rel=1e-5)
        for row, expected_row in zip(logprobs, expected_logprobs, strict=True):
            assert row == pytest.approx(expected_row, abs=1e-5)


@pytest.mark.timeout(2 * DEADLINE_S)
def test_two_ranks_with_parts_of_the_groups_give_the_same_bits_too(pairs: Pairs) -> None:
    assert [each["steps"] for each in pairs["data"]] == [each["steps"] for each in pairs["ours"]]


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_error_of_a_custom_loss_on_one_rank_is_raised_on_both(pairs: Pairs, layout: str) -> None:
    """Later steps are not affected, which the tests above show."""
    mine, theirs = pairs[layout]
    words = {
        "raises": "TrainerFailed: rank 1: loss function touchy: LookupError: no such thing",
        "returns one number": "TrainerFailed: rank 1: loss function touchy: losses have the shape (), must have (",
        "is not finite": "NonFiniteLoss: rank 1: loss function touchy: ",
        "raises on the way back": "TrainerFailed: rank 1: loss function touchy: RuntimeError: one of the variables ",
    }
    assert mine["refused"] == theirs["refused"]
    assert mine["refused"].keys() == words.keys()
    for what, start in words.items():
        assert mine["refused"][what].startswith(start)


@pytest.mark.parametrize("max_tokens", [9, 1000])
def test_a_custom_loss_is_averaged_and_reported_like_the_built_in_one(
    checkpoint: Path, file: Path, max_tokens: int
) -> None:
    custom = partial(load_custom, None, f"{file}:squared", SlimeArgs(), file.parent)
    settings = trainer_settings(
        checkpoint, use_rollout_logprobs=True, max_tokens_per_gpu=max_tokens, eps_clip=1e-9, custom=custom
    )
    settings = pickle.loads(pickle.dumps(settings))
    batch = random_batch()
    with one_rank(settings) as rank:
        report = rank.train(batch)
    outcomes = outcomes_of(batch, settings.train).tolist()
    samples = [scored for group in batch.groups for scored in group.samples]
    losses, ratios = [], []
    for scored, advantage, logprobs in zip(samples, outcomes, report.logprobs, strict=True):
        pairs = zip(logprobs, scored.sample.logprobs, scored.loss_mask, strict=True)
        mine = [math.exp(p - old) for p, old, counts in pairs if counts]
        losses.append(sum((r - 1) ** 2 - r * advantage for r in mine) / max(1, len(mine)))
        ratios += mine
    assert report.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert report.metrics == {"train/custom/ratio": pytest.approx(sum(ratios) / len(ratios), rel=1e-5)}
    assert all(is_declared(name) for name in report.metrics)
    assert report.clip_fraction == 0.0


# ---- advantages


@contextmanager
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class KeptHere(Routes):
    """Routes that no rank may send to another."""

    def __reduce__(self) -> str:
        raise AssertionError("routes are megabytes")


def called(function: Any, **changes: Any) -> Any:
    """Call ``function`` with a batch whose second sample has no tokens, and whose others have routes."""
    batch = random_batch(groups=2, group_size=2, step=4)
    group = batch.groups[0]
    empty = replace(group.samples[1].sample, token_ids=(), logprobs=array("f"), spans=())
    silent = replace(group.samples[1], sample=empty, loss_mask=())
    batch = replace(batch, groups=(replace(group, samples=(group.samples[0], silent)), batch.groups[1]))
    train = trainer_settings(Path(), **changes).train
    examples = [each for group in examples_of(batch) for each in group]
    examples = [
        replace(
            each,
            proximal_logprobs=row.astype("f"),
            ref_logprobs=(row - 0.5).astype("f"),
            routes=KeptHere(experts_NLK=np.zeros((each.num_inputs, 2, 2), np.uint8)),
        )
        for each in examples
        for row in [torch.tensor(each.behaviour_logprobs).numpy()]
    ]
    with alone():
        return custom_advantages(function, batch, outcomes_of(batch, train), examples[::-1], train)


def test_a_function_sees_the_whole_step_in_order() -> None:
    seen = []

    def look(samples: StepSamples) -> torch.Tensor:
        seen.append(samples)
        return samples.rewards_N

    rows = called(look, use_kl_loss=True, kl_loss_type="k2")
    (samples,) = seen
    assert samples.proximal_logprobs is not None and samples.kl is not None
    sizes = [len(mask) for mask in samples.masks]
    assert [len(row) for row in rows] == sizes and sizes[1] == 0
    assert all((row == reward).all() for row, reward in zip(rows, samples.rewards_N, strict=True))
    assert (samples.step, samples.groups_N.tolist()) == (4, [0, 0, 1, 1])
    for place, size in enumerate(sizes):
        torch.testing.assert_close(
            samples.proximal_logprobs[place], samples.behaviour_logprobs[place], rtol=1e-6, atol=0
        )
        torch.testing.assert_close(samples.kl[place], torch.full((size,), 0.125).double(), rtol=1e-5, atol=0)
        assert len(samples.token_ids[place]) > size


def split(samples: StepSamples) -> Sequence[torch.Tensor]:
    sizes = [len(mask) for mask in samples.masks]
    return torch.arange(float(sum(sizes)), dtype=torch.float64).split(sizes)  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.parametrize("function", [split, lambda samples: samples.rewards_N])
def test_the_advantages_of_one_answer_are_sent_without_those_of_all(function: Callable[..., Any]) -> None:
    rows = called(function)
    assert all(len(pickle.dumps(row)) < len(pickle.dumps(torch.zeros(len(row)).double())) + 64 for row in rows)


def test_without_a_reference_there_is_no_kl() -> None:
    seen: list[StepSamples] = []

    def look(samples: StepSamples) -> torch.Tensor:
        seen.append(samples)
        return samples.rewards_N

    called(look)
    assert seen[0].kl is None and seen[0].ref_logprobs is None


def raises(samples: StepSamples) -> torch.Tensor:
    raise LookupError("no such thing")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raises, "raises: LookupError: no such thing"),
        (lambda s: 1.0, "returned a float, not a tensor or a list of tensors"),
        (lambda s: [1.0] * 4, "returned a list with other items, not a tensor"),
        (lambda s: s.rewards_N[:3], r"returned a tensor of shape \(3,\) for 4 samples"),
        (lambda s: list(s.proximal_logprobs)[:2], "returned 2 tensors for 4 samples"),
        (
            lambda s: [torch.zeros(len(mask) + (place == 2)) for place, mask in enumerate(s.masks)],
            r"returned a tensor of shape \(\d+,\) for the \d+ tokens of sample 2",
        ),
    ],
)
def test_wrong_results_of_an_advantage_function_are_named_with_numbers(
    function: Callable[..., Any], words: str
) -> None:
    with pytest.raises(TrainerFailed, match=f"^step 4: advantage function .*{words}"):
        called(function)


def test_a_non_finite_advantage_is_named_with_its_sample_and_token() -> None:
    with pytest.raises(
        NonFiniteLoss, match=r"of (\d+) of the \1 trained tokens of sample 3 are not finite, .* token \d+: nan"
    ):
        called(lambda s: torch.where(torch.arange(4) == 3, torch.nan, s.rewards_N))


# ---- losses


def good(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, lengths: Sequence[int]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -(logprobs - old).exp() * advantages, {"x": logprobs}


def changed_in_place(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, lengths: Sequence[int]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ratio = (logprobs - old).exp()
    losses = -ratio * advantages
    ratio += 1.0
    return losses, {}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda *given: good(*given)[0], "must return losses and a dict, returned a Tensor"),
        (lambda *given: (good(*given)[0].sum(), {}), r"losses have the shape \(\), must have \(5,\)"),
        (lambda *given: (good(*given)[0], {"x": given[0][:2]}), r"x have the shape \(2,\), must have \(5,\)"),
        (lambda *given: (good(*given)[0], {"x": 1.0}), "x must be a tensor, is a float"),
        (lambda *given: (good(*given)[0].detach(), {}), "its losses have no gradient, must be computed from logprobs"),
        (lambda *given: 1 / 0, "ZeroDivisionError: division by zero"),
        (changed_in_place, "RuntimeError: one of the variables needed for gradient computation"),
    ],
)
def test_a_loss_is_tried_before_a_model_is_loaded(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(
        PluginError, match=f"^--custom-loss-function-path: .*loss function {function.__name__}: {words}"
    ):
        CheckedLoss(function)


def tokens(stray: float = 0.0) -> tuple[Any, ...]:
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    return logprobs, torch.tensor([-1.5, stray, -0.5]), torch.ones(3), torch.tensor([True, False, True]), (2, 1)


def test_non_finite_losses_are_raised_after_the_pass_on_every_rank() -> None:
    later: list[int] = []
    loss = CheckedLoss(lambda *given: (good(*given)[0] / (0.0 if later else 1.0), {}))
    later.append(1)
    losses, _ = loss(*tokens())
    assert losses.tolist() == [0.0] * 3 and losses.requires_grad
    words = "rank 0: loss function <lambda>: 2 of 2 losses are not finite, the first is -inf"
    with alone(), pytest.raises(NonFiniteLoss, match=words):
        loss.raise_alike()


def test_metrics_of_a_custom_loss_must_keep_their_names() -> None:
    names = ["a"]
    loss = CheckedLoss(lambda *given: (good(*given)[0], dict.fromkeys(names, given[0])))
    names.append("b")
    _, told = loss(*tokens())
    assert {name: numbers.tolist() for name, numbers in told.items()} == {"train/custom/a": [0.0] * 3}
    with alone(), pytest.raises(TrainerFailed, match="reports a, b, but reported a at first"):
        loss.raise_alike()


def test_a_custom_loss_that_failed_is_not_called_again_before_its_error_is_raised() -> None:
    calls = []

    def second_fails(*given: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        calls.append(given)
        if len(calls) == 2:
            raise LookupError("no such thing")
        return good(*given)

    loss = CheckedLoss(second_fails)
    for _ in range(2):
        losses, told = loss(*tokens())
        assert losses.tolist() == [0.0] * 3 and list(told) == ["train/custom/x"]
    assert len(calls) == 2
    with alone():
        with pytest.raises(TrainerFailed, match="second_fails: LookupError: no such thing"):
            loss.raise_alike()
        losses, _ = loss(*tokens())
        assert losses.tolist() != [0.0] * 3
        loss.raise_alike()


def test_an_error_in_the_backward_pass_of_a_custom_loss_is_raised_after_the_pass() -> None:
    later: list[int] = []
    loss = CheckedLoss(lambda *given: ((changed_in_place if later else good)(*given)[0], {}))
    later.append(1)
    given = tokens()
    loss(*given)[0].sum().backward()  # type: ignore[no-untyped-call]  # torch is untyped
    assert given[0].grad.tolist() == [0.0] * 3
    with alone(), pytest.raises(TrainerFailed, match="<lambda>: RuntimeError: one of the variables needed"):
        loss.raise_alike()


def test_a_token_that_does_not_count_may_carry_any_number() -> None:
    gradients = []
    for stray in (math.nan, -3.0):
        given = tokens(stray)
        losses, _ = CheckedLoss(good)(*given)
        torch.where(given[3], losses, 0.0).sum().backward()  # type: ignore[no-untyped-call]  # torch is untyped
        gradients.append(given[0].grad.tolist())
    assert gradients[0] == gradients[1]


def test_a_custom_loss_is_not_called_for_an_empty_microbatch() -> None:
    calls = []

    def noted(*given: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        calls.append(given)
        return good(*given)

    loss = CheckedLoss(noted)
    nothing = torch.zeros(0, requires_grad=True)
    losses, told = loss(nothing, torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool), ())
    assert (losses.shape, losses.requires_grad, list(told), len(calls)) == ((0,), True, ["train/custom/x"], 1)


def test_every_rank_checks_the_custom_loss_when_it_starts(checkpoint: Path) -> None:
    settings = trainer_settings(checkpoint, custom=partial(Custom, loss=ppo_clip))  # type: ignore[arg-type]  # as a user may get it wrong
    with pytest.raises(PluginError, match=r"loss function ppo_clip: TypeError"), one_rank(settings):
        pass
