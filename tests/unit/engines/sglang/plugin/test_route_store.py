"""The store of experts keeps each pass's rows at their places of the KV cache."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.engines.sglang.plugin import route_store
from asyncrl.engines.sglang.plugin.route_store import Span, around_forward_end, around_get, around_init, read

LAYERS, CHOSEN, PLACES = 3, 2, 10


class Capturer:
    """A capturer of two layers' experts, as SGLang's."""

    num_layers, topk_size = LAYERS, CHOSEN

    def __init__(self) -> None:
        self.host_places: int | None = None
        self.device_cache = SimpleNamespace(buffer=torch.zeros((PLACES, LAYERS, CHOSEN), dtype=torch.int32))

    def _get_local_slice(self, batch: Any, can_run_graph: bool, cuda_graph_batch: int | None) -> torch.Tensor:
        found: torch.Tensor = self.device_cache.buffer[: len(batch.out_cache_loc)]
        return found


def init(capturer: Capturer, model_config: Any, num_tokens: int, *, max_running_requests: int) -> None:
    capturer.host_places = num_tokens


def stock(capturer: Any, *args: Any) -> Any:
    return "stock", args


def capturer_of(num_experts: int) -> Capturer:
    config = SimpleNamespace(hf_text_config=SimpleNamespace(num_experts=num_experts))
    capturer = Capturer()
    around_init(init, capturer, config, num_tokens=PLACES, max_running_requests=4)
    return capturer


def run_pass(capturer: Capturer, places: list[int], rows: torch.Tensor) -> Any:
    capturer.device_cache.buffer[: len(places)] = rows
    return around_forward_end(stock, capturer, SimpleNamespace(out_cache_loc=torch.tensor(places)), False, None, True)


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, torch.uint8), (300, torch.int16)])
def test_rows_are_read_from_the_places_of_a_requests_tokens(num_experts: int, dtype: torch.dtype) -> None:
    capturer = capturer_of(num_experts)
    rows = torch.randint(num_experts, (5, LAYERS, CHOSEN), dtype=torch.int32)
    assert run_pass(capturer, [7, 2, 4], rows[:3]) is None
    assert run_pass(capturer, [9, 3], rows[3:]) is None
    pool = SimpleNamespace(req_to_token=torch.tensor([[0] * 6, [7, 2, 4, 9, 3, 0]]))
    found = around_get(stock, capturer, req_pool_idx=1, seqlen=6, req_to_token_pool=pool, start_len=1)
    assert found.dtype == dtype
    assert torch.equal(found.to(torch.int32), rows[1:])
    assert len(around_get(stock, capturer, 1, 6, pool, 9)) == 0
    with pytest.raises(ValueError, match="start_len=-1"):
        around_get(stock, capturer, 1, 6, pool, -1)


@pytest.mark.parametrize("most_views", [0, 8])
@pytest.mark.parametrize("layers", [slice(1, 3), [0, 2]])
def test_the_rows_of_several_requests_are_read_at_once(
    layers: slice | list[int], most_views: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_store, "_MOST_VIEWS", most_views)
    capturer = capturer_of(300)
    rows = torch.randint(300, (5, LAYERS, CHOSEN), dtype=torch.int32)
    run_pass(capturer, [7, 2, 4, 9, 3], rows)
    pool = SimpleNamespace(req_to_token=torch.tensor([[4, 9, 0, 0], [7, 2, 3, 0]]))
    found = read(capturer, pool, [Span(1, 0, 3), Span(0, 1, 2), Span(0, 0, 1)], layers)
    expected = [rows[[0, 1, 4]], rows[[3]], rows[[2]]]
    assert found == [each[:, layers].to(torch.int16).numpy().tobytes() for each in expected]


def test_nothing_is_pinned_on_the_host() -> None:
    assert capturer_of(8).host_places == 0


def test_capturers_of_other_things_are_left_to_sglang() -> None:
    other = Capturer()
    assert run_pass(other, [1], torch.zeros((1, LAYERS, CHOSEN), dtype=torch.int32))[0] == "stock"
    assert around_get(stock, other, 1, 6, None, 2) == ("stock", (1, 6, None, 2))
