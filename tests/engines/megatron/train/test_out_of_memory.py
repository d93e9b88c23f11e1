"""A pass that runs out of memory is repeated in smaller microbatches where no rank waits within it."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from asyncrl.engines.megatron import TrainerSettings
from asyncrl.engines.megatron.setup import less_memory
from asyncrl.engines.megatron.train.learner import Learner
from asyncrl.errors import TrainerOutOfMemory
from asyncrl.types import TrainReport
from tests.engines.megatron.tiny import free_port, one_rank, random_batch, trainer_settings, write_checkpoint
from tests.engines.megatron.train import memory_process
from tests.engines.megatron.train.memory_process import Shortage, trained
from tests.forks import Fork

DEADLINE_S = 720
pytestmark = [pytest.mark.timeout(2 * DEADLINE_S), pytest.mark.filterwarnings("ignore:::torch")]

REPEATED = "train/repeated_passes"


@pytest.fixture(scope="module", params=["dense", "mixture"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("hf"), moe=request.param == "mixture")


def settings(checkpoint: Path, **changes: Any) -> TrainerSettings:
    """Microbatches of about three samples, two updates, and a reference model: passes of every kind."""
    usual: dict[str, Any] = {"max_tokens_per_gpu": 40, "num_steps_per_rollout": 2, "kl_coef": 0.1}
    return trainer_settings(checkpoint, **(usual | changes))


def weights(rank: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in rank._model.named_parameters()}  # noqa: SLF001


def steps(settings: TrainerSettings, **shortage: Any) -> tuple[list[TrainReport], dict[str, torch.Tensor], Shortage]:
    """Train two steps, of which the second may run out of memory."""
    with one_rank(settings) as rank:
        reports = [rank.train(random_batch())]
        with Shortage(rank, **shortage) as short:
            reports.append(rank.train(random_batch(seed=1, step=1)))
        return reports, weights(rank), short


type Trained = tuple[list[TrainReport], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def with_room(checkpoint: Path) -> Trained:
    """The reports and weights of two steps that do not run out of memory."""
    reports, found, _ = steps(settings(checkpoint))
    return reports, found


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("first", [0, 1, 3, 5, 8])
def test_a_repeated_pass_gives_the_same_weights(checkpoint: Path, with_room: Trained, place: str, first: int) -> None:
    """Microbatch ``first`` of the step fails: of the log-probs, of the reference model, or of an update."""
    usual, expected = with_room
    reports, found, short = steps(settings(checkpoint), place=place, first=first)
    if not short.was_met:
        assert place == "backward", "passes without gradients have no backward pass"
        return
    assert REPEATED not in usual[1].metrics
    assert reports[1].metrics[REPEATED] == 1.0
    assert reports[1].loss == pytest.approx(usual[1].loss, rel=1e-5)
    assert reports[1].grad_norm == pytest.approx(usual[1].grad_norm, rel=1e-5)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_tokens", [40, 1000])  # in the second of several microbatches, or in the only one
def test_the_first_pass_of_a_run_may_be_repeated(checkpoint: Path, max_tokens: int) -> None:
    """Megatron records in the first backward pass how often each gradient becomes ready."""
    expected: dict[str, torch.Tensor] = {}
    for place in (None, "backward"):
        changes: dict[str, Any] = {"num_steps_per_rollout": 1, "kl_coef": 0.0, "use_rollout_logprobs": True}
        with one_rank(settings(checkpoint, max_tokens_per_gpu=max_tokens, **changes)) as rank:
            with Shortage(rank, place=place, first=int(max_tokens == 40)) as short:
                rank.train(random_batch())
            assert short.was_met is (place is not None)
            rank.train(random_batch(seed=1, step=1))
            found = weights(rank)
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)
        expected = found


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_repeated_pass_has_the_memory_of_the_failed_one(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    watched: Any = StorageWeakRef  # torch does not type it
    outputs: list[Any] = []
    alive_then: list[int] = []

    def note(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        outputs.extend(watched(each.untyped_storage()) for each in tensors if getattr(each, "requires_grad", False))

    def undo(self: Learner, *given: Any, **options: Any) -> None:
        usual(self, *given, **options)
        alive_then.append(sum(not each.expired() for each in outputs))

    usual = Learner._undo  # noqa: SLF001
    monkeypatch.setattr(Learner, "_undo", undo)
    changes: dict[str, Any] = {"num_steps_per_rollout": 1, "kl_coef": 0.0, "use_rollout_logprobs": True}
    with one_rank(settings(checkpoint, max_tokens_per_gpu=1000, **changes)) as rank:
        for module in rank._model.decoder.modules():  # noqa: SLF001
            module.register_forward_hook(note)
        with Shortage(rank, place=place, first=0) as short:
            rank.train(random_batch())
    assert short.was_met
    assert len(outputs) > 20
    assert alive_then == [0]


def test_memory_that_runs_out_twice_ends_the_step(checkpoint: Path) -> None:
    with pytest.raises(
        TrainerOutOfMemory, match=r"CUDA out of memory.*also in smaller microbatches; lower max-tokens-per-gpu"
    ):
        steps(settings(checkpoint), place="forward", first=0, times=2)


def test_settings_for_less_memory_give_the_same_weights(
    checkpoint: Path, with_room: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(less_memory, "FEWEST_TOKENS", 20)
    found = less_memory.less_memory(settings(checkpoint))
    assert found is not None
    assert found[1] == "recompute-granularity full, max-tokens-per-gpu 20"
    usual, expected = with_room
    reports, weights_then, _ = steps(found[0])
    assert reports[1].loss == pytest.approx(usual[1].loss, rel=1e-5)
    for name, weight in expected.items():
        torch.testing.assert_close(weights_then[name], weight, rtol=1e-4, atol=1e-5)


def test_fixed_microbatches_are_halved(checkpoint: Path) -> None:
    usual, expected, _ = steps(settings(checkpoint, micro_batch_size=4))
    reports, found, _ = steps(settings(checkpoint, micro_batch_size=4), place="backward", first=2)
    assert reports[1].loss == pytest.approx(usual[1].loss, rel=1e-5)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5)


# ---- two ranks


@contextmanager
def other_rank(task: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    process = Fork(memory_process.__name__, json.dumps(task), stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def two_ranks(checkpoint: Path, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Run cases on two ranks; return the results of each rank."""
    with_ports = [{**case, "port": free_port()} for case in cases]
    with other_rank({"checkpoint": str(checkpoint), "cases": with_ports}) as process:
        mine = [trained(0, checkpoint, case) for case in with_ports]
        others = json.loads(process.communicate(timeout=DEADLINE_S)[0].splitlines()[-1])
    return [mine, others]


def test_one_of_two_ranks_repeats_its_pass_while_the_other_waits(tmp_path: Path) -> None:
    """With an overlapped reduction, only until the rank has begun to sum gradients."""
    plain, overlapped = {"overlap_grad_reduce": False}, {"overlap_grad_reduce": True}
    cases: list[dict[str, Any]] = [
        {"parallel": plain, "place": None, "first": 0},
        {"parallel": plain, "place": "backward", "first": 3},
        {"parallel": overlapped, "place": None, "first": 0},
        {"parallel": overlapped, "place": "backward", "first": 1},
        {"parallel": overlapped, "place": "forward", "first": 1},
    ]
    mine, others = two_ranks(write_checkpoint(tmp_path), cases)
    for place, case in enumerate(cases):
        reference = mine[0 if case["parallel"] is plain else 2]
        for results in (mine, others):
            assert results[place]["error"] is None
            assert results[place]["repeated"] == (0 if case["place"] is None else 1), "all ranks report the same"
            assert results[place]["weights"] == pytest.approx(reference["weights"], rel=1e-4, abs=1e-5)


def test_ranks_that_share_a_model_do_not_repeat(checkpoint: Path) -> None:
    """A rank alone cannot know what the others wait for.  Here there is one, with the flags of two."""
    with one_rank(settings(checkpoint)) as rank:
        rank._learner._is_split = True  # noqa: SLF001
        with (
            Shortage(rank, place="forward", first=0),
            pytest.raises(TrainerOutOfMemory, match="ranks of one model wait"),
        ):
            rank.train(random_batch())
