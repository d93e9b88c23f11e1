"""A user's off-policy correction in the real trainer, in the native and in slime's shape."""

import math
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.app.checks import check
from asyncrl.compat import SlimeArgs, provide_slime
from asyncrl.compat.slime_path import SHIM
from asyncrl.config import load_run
from asyncrl.engines.megatron.train.custom_loss import CheckedLoss
from asyncrl.engines.megatron.train.custom_tis import CheckedTis
from asyncrl.errors import ConfigError, NonFiniteLoss, PluginError
from asyncrl.plugins import load_custom
from asyncrl.types import Batch, TrainReport
from tests.declared_metrics import is_declared
from tests.engines.megatron.tiny import one_rank, trainer_settings, write_checkpoint
from tests.engines.megatron.train.episode_batches import episode_batch, unknown

QUICKSTART = Path(__file__).parents[4] / "configs" / "quickstart.toml"
ARGS = SlimeArgs(use_tis=True, upper=1.5, floor=0.7)
OURS = """
def truncated(losses, logprobs, behaviour, mask, lengths):
    weights = (logprobs - behaviour).clamp(-20.0, 20.0).exp().clamp(0.0, 1.5)
    return losses * weights, None, {"weight": weights}

def rejected(losses, logprobs, behaviour, mask, lengths):
    ratio = (logprobs - behaviour).exp()
    return losses * 1.0, ratio >= 0.7, {"ratio": ratio}
"""
SLIMES = """
import torch
from slime.backends.megatron_utils.cp_utils import all_gather_with_cp

def _gathered(rows, totals, lengths):
    return [all_gather_with_cp(row, total, length) for row, total, length in zip(rows, totals, lengths, strict=True)]

def truncated(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kw):
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    assert not kw and all(total > length for total, length in zip(total_lengths, response_lengths, strict=True))
    train = _gathered(train_log_probs, total_lengths, response_lengths)
    rollout = _gathered(rollout_log_probs, total_lengths, response_lengths)
    weights = [(new - old).clamp(-20.0, 20.0).exp().clamp(0.0, args.upper) for new, old in zip(train, rollout)]
    flat = torch.cat([slice_log_prob_with_cp(w, t, n) for w, t, n in zip(weights, total_lengths, response_lengths)])
    return pg_loss * flat, loss_masks, {"weight": flat}

def rejected(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kw):
    ratios = [(new - old).exp() for new, old in zip(train_log_probs, rollout_log_probs)]
    masks = [mask * (ratio >= args.floor).float() for mask, ratio in zip(loss_masks, ratios)]
    return pg_loss * 1.0, masks, {"ratio": torch.cat(ratios)}
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with both files, and a folder ``slime`` as in slime's own root.  No shim is left behind."""
    (tmp_path / "ours.py").write_text(OURS)
    (tmp_path / "slimes.py").write_text(SLIMES)
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").write_text("raise ImportError('the folder in the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        del sys.modules[name]


def test_the_shim_wins_over_a_folder_that_is_searched_earlier(here: Path) -> None:
    sys.path[:0] = [str(here), str(SHIM)]
    sys.path.insert(0, str(here))
    provide_slime()
    provide_slime()
    assert Path(str(sys.modules["slime"].__file__)).is_relative_to(SHIM)
    assert sys.path.count(str(here)) >= 2


def trained(checkpoint: Path, batch: Batch, path: str | None, **changes: Any) -> TrainReport:
    settings = trainer_settings(checkpoint, use_tis=True, lr=1e-2, **changes)
    if path is not None:
        resolve = partial(load_custom, None, None, ARGS, Path.cwd(), path)
        settings = replace(settings, custom=pickle.loads(pickle.dumps(resolve)))
    with one_rank(settings) as rank:
        return rank.train(batch)


@pytest.mark.parametrize("path", ["ours.py:truncated", "slimes.py:truncated", "slimes.truncated"])
@pytest.mark.parametrize("max_tokens", [30, 1000])
@pytest.mark.usefixtures("here")
def test_a_correction_by_path_does_what_the_built_in_one_does(checkpoint: Path, path: str, max_tokens: int) -> None:
    batch = unknown(episode_batch())
    changes: dict[str, Any] = {"max_tokens_per_gpu": max_tokens, "use_opsm": True}
    built_in = trained(checkpoint, batch, None, tis_clip=1.5, **changes)
    by_path = trained(checkpoint, batch, path, **changes)
    assert (by_path.loss, by_path.grad_norm) == (built_in.loss, built_in.grad_norm)
    assert by_path.metrics["train/tis/weight"] == built_in.metrics["train/tis_weight"]
    assert by_path.metrics["train/tis_removed"] == 0
    assert all(is_declared(name) for name in by_path.metrics)


@pytest.mark.parametrize("path", ["ours.py:rejected", "slimes.py:rejected"])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.usefixtures("here")
def test_a_removed_token_adds_nothing_and_the_divisors_count_it(checkpoint: Path, path: str, per_token: bool) -> None:
    """So do the divisors of slime, whose masks of the batch precede the correction."""
    batch = episode_batch()
    changes: dict[str, Any] = {"entropy_coef": 0.1, "calculate_per_token_loss": per_token}
    removed = trained(checkpoint, batch, path, **changes)
    masks = {"tis_mode": "mask", "tis_clip_low": 0.7, "tis_clip": 1e9}
    plain = trained(checkpoint, batch, None, **changes, **masks)
    share = plain.metrics["train/tis_outside"]
    assert removed.metrics["train/tis_removed"] == share > 0.1
    assert removed.entropy == plain.entropy  # reported over all tokens of the mask
    samples = [(group, scored) for group in batch.groups for scored in group.samples]
    kept = [
        tuple(
            int(counts and new - old >= math.log(0.7))
            for counts, new, old in zip(scored.loss_mask, row, scored.sample.logprobs, strict=True)
        )
        for (_, scored), row in zip(samples, removed.logprobs, strict=True)
    ]
    flat = iter(kept)
    thinned = replace(
        batch,
        groups=tuple(
            replace(group, samples=tuple(replace(scored, loss_mask=next(flat)) for scored in group.samples))
            for group in batch.groups
        ),
    )
    with_fewer = trained(checkpoint, thinned, None, tis_mode="truncate", tis_clip=1.0, tis_clip_low=1.0, **changes)
    if per_token:
        total, left = (sum(map(sum, masks)) for masks in ([s.loss_mask for _, s in samples], kept))
        assert removed.loss == pytest.approx(with_fewer.loss * left / total, rel=1e-4)
    else:
        assert abs(removed.loss) < abs(with_fewer.loss)  # the mean of fewer tokens is larger


def called(function: Any, **changes: Any) -> tuple[Any, ...]:
    """Call a checked correction on two tokens of one answer; the second is masked."""
    tis = CheckedTis(function)
    losses = torch.tensor([1.0, 5.0], requires_grad=True)
    given = {"logprobs": torch.tensor([-1.0, -1.0]), "behaviour": torch.tensor([-1.5, math.nan])} | changes
    found = tis(losses, given["logprobs"], given["behaviour"], torch.tensor([True, False]), (2,), (3,))
    return (tis, losses, *found)


def test_numbers_of_masked_tokens_never_reach_the_function() -> None:
    def correct(losses: Any, logprobs: Any, behaviour: Any, mask: Any, lengths: Any, totals: Any) -> Any:
        assert behaviour.isfinite().all()
        return losses * (logprobs - behaviour), None, {}

    _, losses, found, kept, told = called(correct)
    assert found.tolist() == [0.5, 0.0] and kept.tolist() == [True, False]
    assert told.keys() == {"train/tis_removed"}
    found.sum().backward()
    assert losses.grad is not None and losses.grad.tolist() == [0.5, 0.0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda *given: given[0], "must return losses, a mask or None, and a dict, returned a Tensor"),
        (lambda *given: (given[0].sum(), None, {}), r"losses have the shape \(\), must have \(5,\)"),
        (lambda *given: (given[0], None, {"x": given[0][:2]}), r"x have the shape \(2,\), must have \(5,\)"),
        (lambda *given: (given[0], given[3][:2], {}), r"masks have the shape \(2,\), must have \(5,\)"),
        (lambda *given: (given[0], [1, 2], {}), "masks must be a tensor, is a list"),
        (lambda *given: (given[0], given[0] * 0.5, {}), "masks must have 0 and 1 alone"),
        (lambda *given: (given[0].detach(), None, {}), "its losses have no gradient, must be computed from the given"),
        (lambda *given: (given[0] / 0.0, None, {}), "4 of 4 losses are not finite"),
        (lambda *given: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_correction_is_tried_before_a_model_is_loaded(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(
        PluginError, match=f"^--custom-tis-function-path: tried on made-up .*correction <lambda>: {words}"
    ):
        CheckedTis(function)


@pytest.mark.parametrize("checked", [CheckedTis, CheckedLoss])
def test_a_shortage_of_memory_ends_the_trial_and_leaves_a_pass(checked: Callable[..., Any]) -> None:
    is_trial = True

    def hungry(first: torch.Tensor, *given: Any) -> Any:
        if is_trial is (first.shape[0] == 5):
            raise torch.OutOfMemoryError("20 GiB")
        return (first, None, {}) if checked is CheckedTis else (first, {})

    with pytest.raises(PluginError, match="tried on made-up numbers: 20 GiB"):
        checked(hungry)
    is_trial = False
    function, row = checked(hungry), torch.zeros(2)
    mask, totals = torch.tensor([True, True]), (2,)
    given = (row, row, row, mask, (2,), totals) if checked is CheckedTis else (row, row, row, mask, (2,))
    with pytest.raises(torch.OutOfMemoryError):
        function(*given)


def test_an_error_within_a_pass_is_kept_until_it_ends() -> None:
    calls: list[int] = []

    def correct(losses: Any, *rest: Any) -> Any:
        calls.append(1)
        return (losses if len(calls) == 1 else losses.sum()), None, {}

    tis, _, found, *_ = called(correct)
    assert found.tolist() == [0.0, 0.0] and found.requires_grad
    assert tis.failure.is_there


@pytest.mark.usefixtures("here")
def test_the_trainer_raises_it_and_changes_no_weight(checkpoint: Path) -> None:
    (Path.cwd() / "late.py").write_text(
        "calls = []\n"
        "def correct(losses, logprobs, behaviour, mask, lengths):\n"
        "    calls.append(1)\n"
        "    return losses / (1.0 if len(calls) == 1 else 0.0), None, {}\n"
    )
    with pytest.raises(NonFiniteLoss, match="rank 0: correction correct: "):
        trained(checkpoint, episode_batch(), "late.py:correct")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "def f(losses, mask): ...",
            r"must take \(losses, logprobs, behaviour, mask, lengths\) or slime's \(args, pg_",
        ),
        ("def f(args, pg_loss): ...", "must take .* takes \\(args, pg_loss\\)"),
        (
            "from slime.nothing import x\ndef f(args, **kw): ...",
            "wrong.py:1 needs slime.nothing, which asyncrl does not have",
        ),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_wrong_file_is_one_line_at_the_start(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "wrong.py").write_text(code)
    run = load_run(["--config", str(QUICKSTART), "--use-tis", "--custom-tis-function-path", f"{tmp_path}/wrong.py:f"])
    with pytest.raises(PluginError, match=f"^--custom-tis-function-path '.*wrong.py:f': .*{words}"):
        check(run)


def test_a_correction_without_tis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="custom-tis-function-path without use-tis: the function would not be called"):
        load_run(["--config", str(QUICKSTART), "--custom-tis-function-path", f"{tmp_path}/a.py:f"])
