"""SGLang loads each bucket whose replay differs from what its loaders do, and replays all others."""

import json
import logging
from collections.abc import Callable, Iterable
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.engines.sglang.labels import DIRECT, DIRECT_CHECKED, NOT_REPLAYED, RECORDED
from asyncrl.engines.sglang.plugin import direct
from asyncrl.engines.sglang.plugin.copies import RecordedBucket
from asyncrl.engines.sglang.plugin.replay_check import ReplayCheck
from asyncrl.engines.weight_sync.flat import checksum, checksums

Loader = Callable[[torch.Tensor, torch.Tensor], object]
"""Writes its second argument, a received tensor, into its first, a weight."""


class Model:
    """Three weights in two buckets: ``a`` and ``b`` arrive together, ``c`` alone; ``odd`` is a buffer."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, loads_b: Loader | None = None) -> None:
        self.weights = {name: torch.zeros(4, 2, dtype=dtype) for name in ("a", "b", "c")}
        self.weights["b"] = self.weights["b"].t().contiguous().t()  # as SGLang keeps weights in fp8
        self.odd = torch.zeros(3)
        self.loads_b: Loader = loads_b or torch.Tensor.copy_
        self.num_loaded = 0

    def parameters(self) -> Iterable[torch.Tensor]:
        return self.weights.values()

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.weights.items()

    def named_buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        return (("odd", self.odd),)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.num_loaded += 1
            target = self.weights[name]
            if name == "b":
                self.loads_b(target, tensor)
            else:
                target.copy_(tensor)


class Engine:
    """One rank without a network, which has had its first update; each update fills all weights with one value."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
        self.model = model
        self.hook = direct.DirectUpdates()
        self._sent = 0.0
        self._updater = SimpleNamespace(device="cpu", get_model=lambda: model, _model_update_group={"g": object()})
        monkeypatch.setattr(direct, "broadcast", lambda flat, group: None)
        monkeypatch.setattr(direct, "wait", self._arrive)
        monkeypatch.setattr(direct, "check_arrival", lambda flat, group, name: None)
        monkeypatch.setattr(direct, "ranks_of_this_engine", lambda: None)
        for names in (["a", "b"], ["c"]):
            assert self.receive("flattened_bucket", names, value=1.0)

    def receive(self, load_format: str, names: list[str], *, value: float) -> str:
        """Receive ``value`` in every weight; the hook's answer."""
        self._sent = value
        dtype = str(self.model.weights["a"].dtype).removeprefix("torch.")
        worked, said = self.hook.around_receive(
            _original, self._updater, names, [dtype] * len(names), [[4, 2]] * len(names), "g", load_format
        )
        assert worked, said
        return said

    def _arrive(self, coming: object, flat: torch.Tensor, group: object) -> None:
        dtype = self.model.weights["a"].dtype
        flat.copy_(torch.full((flat.numel() // dtype.itemsize,), self._sent).to(dtype).view(torch.uint8))

    def values(self) -> dict[str, list[float]]:
        return {name: sorted(set(weight.flatten().tolist())) for name, weight in self.model.weights.items()}


def _original(*asked: Any) -> tuple[bool, str]:
    return False, f"the hook passed on {asked}"


def in_a_thread(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy as SGLang does for DeepSeek's weights."""
    worker = Thread(target=lambda: target.copy_(source))
    worker.start()
    worker.join()


def refused(*names: str) -> str:
    return f"{RECORDED} {NOT_REPLAYED}{json.dumps(names)}"


@pytest.mark.parametrize("load_format", [DIRECT, DIRECT_CHECKED])
def test_a_bucket_that_a_thread_loads_is_found_and_never_replayed_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, load_format: str
) -> None:
    engine = Engine(monkeypatch, Model(loads_b=in_a_thread))
    with caplog.at_level(logging.WARNING):
        assert engine.receive(load_format, ["a", "c"], value=2.0) == refused("a")
    assert engine.values() == {"a": [2.0], "b": [2.0], "c": [2.0]}
    assert "a replay of the bucket of a is not all that SGLang's loaders do" in caplog.text
    for value in (3.0, 4.0):
        before = engine.model.num_loaded
        assert engine.receive(DIRECT, ["a", "c"], value=value) == refused("a")  # repeated, as an answer may be lost
        assert engine.values() == {"a": [value], "b": [value], "c": [value]}
        assert engine.model.num_loaded - before == 2  # c is replayed
    assert len(caplog.records) == 1


def test_a_bucket_that_a_thread_loads_is_found_also_when_an_update_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a first step with a learning rate of 0, a weight that the replay missed holds the right bytes by chance."""
    engine = Engine(monkeypatch, Model(loads_b=in_a_thread))
    assert engine.receive(DIRECT, ["a", "c"], value=1.0) == refused("a")
    assert engine.values() == {"a": [1.0], "b": [1.0], "c": [1.0]}


def test_a_refused_bucket_is_not_replayed_in_a_new_group_either(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, Model(loads_b=in_a_thread))
    engine.receive(DIRECT, ["a", "c"], value=2.0)
    assert engine.receive("flattened_bucket", ["a", "b"], value=3.0) == refused("a")
    assert engine.receive("flattened_bucket", ["c"], value=3.0) == RECORDED
    assert engine.receive(DIRECT, ["a", "c"], value=4.0) == refused("a")
    assert engine.values() == {"a": [4.0], "b": [4.0], "c": [4.0]}


def test_a_bucket_whose_loader_refuses_other_values_is_loaded_by_it_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(target: torch.Tensor, source: torch.Tensor) -> None:
        if float(source[0, 0]) not in (1.0, 2.0, 3.0):
            raise ValueError("no such weight")
        target.copy_(source)

    model = Model()
    engine = Engine(monkeypatch, model)
    model.loads_b = load
    assert engine.receive(DIRECT, ["a", "c"], value=2.0) == refused("a")
    assert engine.values() == {"a": [2.0], "b": [2.0], "c": [2.0]}
    assert engine.receive(DIRECT, ["a", "c"], value=3.0) == refused("a")
    assert engine.values() == {"a": [3.0], "b": [3.0], "c": [3.0]}


class Layers:
    """Two layers; half of each storage is never replayed, as where experts arrive with weights that are computed."""

    def __init__(self) -> None:
        self.experts = {f"layers.{layer}.experts": torch.zeros(2, 4) for layer in (0, 1)}

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.experts.items()

    def named_buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        return ()

    def bucket(self, layer: int, *, is_own: bool = True) -> RecordedBucket:
        """The bucket that has the first expert of a layer."""
        targets = (self.experts[f"layers.{layer}.experts"][0],) if is_own else ()
        names = (f"layers.{layer}.experts.0",)
        return RecordedBucket(names=names, dtypes=("float32",), shapes=((4,),), num_bytes=16, targets=targets)


def test_a_storage_that_is_replayed_in_part_is_read_for_the_buckets_of_its_layer_alone() -> None:
    model = Layers()
    buckets = [model.bucket(0), model.bucket(1)]
    other = model.bucket(0, is_own=False)  # of layer 0, although it copies nothing there
    check = ReplayCheck(model, [*buckets, other])
    for bucket, layer in ((buckets[0], 0), (buckets[1], 1), (other, 0)):
        (found,) = check._checksums(bucket).values()  # noqa: SLF001
        before = found.clone()
        model.experts[f"layers.{1 - layer}.experts"][1] += 1.0
        assert torch.equal(check._checksums(bucket)[found.device], before)  # noqa: SLF001
        model.experts[f"layers.{layer}.experts"][1] += 1.0
        assert not torch.equal(check._checksums(bucket)[found.device], before)  # noqa: SLF001


def test_a_buffer_that_a_thread_writes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()

    def load(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        in_a_thread(model.odd, source[:3, 0])

    model.loads_b = load
    engine = Engine(monkeypatch, model)
    assert engine.receive(DIRECT, ["a", "c"], value=2.0) == refused("a")
    assert model.odd.tolist() == [2.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_loader_that_only_copies_is_tested_once_and_replayed_from_then_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    engine = Engine(monkeypatch, Model(dtype=dtype))
    num_loaded = []
    for load_format, value in ((DIRECT, 2.0), (DIRECT, 3.0), (DIRECT_CHECKED, 4.0), (DIRECT, 5.0)):
        before = engine.model.num_loaded
        assert engine.receive(load_format, ["a", "c"], value=value) == RECORDED
        assert engine.values() == {"a": [value], "b": [value], "c": [value]}
        num_loaded.append(engine.model.num_loaded - before)
    assert num_loaded == [6, 0, 6, 0]
    assert not caplog.records


def test_a_loader_that_changes_where_it_writes_is_found_by_a_checked_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that moves experts writes the same bytes to other places."""
    engine = Engine(monkeypatch, Model())
    assert engine.receive(DIRECT, ["a", "c"], value=2.0) == RECORDED
    weights = engine.model.weights
    weights["a"], weights["c"] = weights["c"], weights["a"]
    engine.hook._places = direct._places(engine.model)  # noqa: SLF001
    assert engine.receive(DIRECT_CHECKED, ["a", "c"], value=3.0) == refused("a", "c")
    assert engine.values() == {"a": [3.0], "b": [3.0], "c": [3.0]}


def test_checksums_of_several_tensors_equal_the_checksum_of_each() -> None:
    draw = torch.Generator().manual_seed(0)
    flats = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=draw) for size in (1, 3, 4, 4_001, 20_000_003)]
    assert checksums(flats).tolist() == [checksum(flat).item() for flat in flats]
