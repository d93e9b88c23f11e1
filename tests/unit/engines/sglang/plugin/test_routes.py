"""The rows of a request go out with its tokens, each once, also if it is retracted."""

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engines.sglang.plugin import route_store, routes
from asyncrl.engines.sglang.plugin.route_store import Span
from asyncrl.engines.sglang.plugin.routes import RouteRows, after_join


class Capturer:
    """Rows by position: layer 0 is dense, so it has zeros."""

    version = 0
    reads = 0

    def read(self, capturer: Any, pool: Any, spans: list[Span], layers: slice) -> list[bytes]:
        assert (capturer, pool) == (self, "pool")
        self.reads += 1
        return [self.rows(start, stop)[:, layers].numpy().tobytes() for _, start, stop in spans]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        first = torch.arange(start, stop, dtype=torch.int32)[:, None] + torch.tensor([0, 1, 2]) + 10 * self.version
        found = torch.stack([first, first + 1], dim=2).to(torch.uint8)
        found[:, 0] = 0
        return found


class Server:
    """The parts of a scheduler that the hooks touch, with requests of 4 prompt tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_pickled: bool = True) -> None:
        self.capturer = Capturer()
        module = SimpleNamespace(get_global_experts_capturer=lambda: self.capturer)
        monkeypatch.setitem(__import__("sys").modules, "sglang.srt.state_capturer.routed_experts", module)
        monkeypatch.setattr(route_store, "read", self.capturer.read)
        monkeypatch.setattr(routes, "_mixture_layers", lambda scheduler: slice(1, 3))
        monkeypatch.setattr(routes, "_is_pickled", lambda scheduler: is_pickled)
        self.hooks = RouteRows()
        self.hooks.before_run_batch(SimpleNamespace(req_to_token_pool="pool"))
        self.request: Any = SimpleNamespace(
            origin_input_ids=[0] * 4,
            output_ids_through_stop=[],
            req_pool_idx=3,
            return_routed_experts=True,
            routed_experts=None,
            routed_experts_start_len=1,
        )
        self.sent: list[Any] = []

    def write(self, count: int) -> None:
        self.request.output_ids_through_stop += [0] * count

    def stream(self, *, is_due: bool = True) -> None:
        events = SimpleNamespace(rids=["other"], routed_experts=[None])

        def accept(events: Any, *, req: Any) -> None:
            if is_due:
                events.rids.append("mine")
                events.routed_experts.append(req.routed_experts)

        self.hooks.around_accept(accept, events, req=self.request)
        self.hooks.before_payload(events, dp_rank=None, is_idle_batch=False)
        assert events.routed_experts[0] is None
        self.sent += events.routed_experts[1:]

    def retract(self) -> None:
        self.hooks.before_release(req=self.request, req_to_token_pool="pool", tree_cache=None)
        self.request.req_pool_idx = self.request.routed_experts = None

    def finish(self) -> None:
        self.hooks.around_collection(self.collect, None, self.request)
        self.request.req_pool_idx = None  # SGLang frees the request's places
        self.stream()

    def collect(self, processor: None, req: Any) -> None:
        """SGLang's own way, which the hooks use only if they are disabled."""
        assert not self.hooks.is_working
        req.routed_experts = "stock"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def narrow(start: int, stop: int, version: int = 0) -> list[Any]:
    capturer = Capturer()
    capturer.version = version
    found: list[Any] = capturer.rows(start, stop)[:, 1:].tolist()
    return found


def read(rows: Any) -> Any:
    """Rows as they are after their way to the next process."""
    data = pickle.loads(pickle.dumps(rows)).numpy().tobytes()
    return np.frombuffer(data, np.uint8).reshape(-1, 2, 2)


def told(sent: list[Any]) -> list[Any]:
    return [row for each in sent if each is not None for row in read(each).tolist()]


def test_each_event_has_the_rows_of_its_tokens_and_the_last_one_the_rest(server: Server) -> None:
    for count in (1, 5, 2):
        server.write(count)
        server.stream(is_due=count != 5)
    server.write(3)
    server.finish()
    assert [None if each is None else len(read(each)) for each in server.sent] == [3, 7, 3]  # from position 1
    assert told(server.sent) == narrow(1, 14)


def test_the_rows_of_a_passs_events_are_read_at_once(server: Server) -> None:
    events = SimpleNamespace(rids=[], routed_experts=[])

    def accept(events: Any, *, req: Any) -> None:
        events.rids.append("mine")
        events.routed_experts.append(req.routed_experts)

    server.write(2)
    requests = [SimpleNamespace(**vars(server.request) | {"routed_experts_start_len": start}) for start in (1, 5, 0)]
    for request in requests:
        server.hooks.around_accept(accept, events, req=request)
    server.hooks.before_payload(events)
    assert server.capturer.reads == 1
    assert [None if each is None else read(each).tolist() for each in events.routed_experts] == [
        narrow(1, 5),
        None,  # its rows were sent
        narrow(0, 5),
    ]


def test_rows_that_another_pass_may_have_overwritten_are_missing(server: Server) -> None:
    server.write(3)
    server.hooks.around_collection(server.collect, None, server.request)
    server.hooks.before_run_batch(SimpleNamespace(req_to_token_pool="pool"))
    server.stream()
    assert server.sent == [None]


def test_rows_are_tensors_where_the_next_process_reads_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, is_pickled=False)
    server.write(2)
    server.stream()
    server.write(1)
    server.finish()
    assert all(isinstance(each, torch.Tensor) for each in server.sent)
    assert told(server.sent) == narrow(1, 6)


def test_a_retracted_request_keeps_the_rows_it_was_sampled_with(server: Server) -> None:
    server.write(3)
    server.stream()
    server.write(4)
    server.retract()
    server.stream()  # as it is queued again
    server.capturer.version = 1  # new weights compute all rows anew
    server.request.req_pool_idx = 3
    server.write(2)
    server.finish()
    assert told(server.sent) == narrow(1, 10) + narrow(10, 12, version=1)


def test_a_retracted_request_without_unsent_tokens_is_sent_once(server: Server) -> None:
    server.write(3)
    server.stream()
    server.retract()
    server.stream()
    assert [None if each is None else len(read(each)) for each in server.sent] == [5, None]


def test_rows_that_were_kept_come_with_the_next_event_if_nothing_was_streamed_between(server: Server) -> None:
    server.write(3)
    server.retract()
    server.request.req_pool_idx = 3
    server.write(2)
    server.finish()
    assert told(server.sent) == narrow(1, 8)


EVENTS = st.one_of(
    st.tuples(st.just("write"), st.integers(1, 4)),
    st.tuples(st.just("stream"), st.integers(0, 1)),  # 0: SGLang sends nothing yet
    st.tuples(st.just("retract"), st.integers(0, 1)),  # 1: new weights arrive before it runs again
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(EVENTS, max_size=12), st.booleans())
def test_over_random_retractions_rows_are_those_of_an_uncut_answer(events: list[tuple[str, int]], ends: bool) -> None:
    """Each row comes once, in order, with the experts of the weights under which its token was predicted."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        server = Server(monkeypatch)
        expected: list[Any] = []
        for kind, number in [("write", 1), *events, ("write", 1)]:
            if kind == "write":
                server.write(number)
                known, stop = 1 + len(expected), 3 + len(server.request.output_ids_through_stop)
                expected += narrow(known, stop, server.capturer.version)
            elif kind == "stream":
                server.stream(is_due=number == 1)
            else:
                server.retract()
                server.stream()  # as it is queued again
                server.capturer.version += number
                server.request.req_pool_idx = 3
        if ends:
            server.finish()
        else:  # aborted while it waits
            server.retract()
            server.stream()
        assert told(server.sent) == expected


def test_other_requests_are_left_alone(server: Server) -> None:
    server.request.return_routed_experts = False
    server.write(3)
    server.stream()
    server.retract()
    assert server.sent == [None]


def test_another_sglang_disables_the_hooks_with_one_warning(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    del server.request.routed_experts_start_len
    for _ in range(2):
        server.write(1)
        server.stream()
    assert server.sent == [None, None]
    assert not server.hooks.is_working
    server.finish()
    assert server.sent[-1] == "stock"
    assert len(caplog.records) == 1


def test_events_that_are_joined_have_the_rows_of_all() -> None:
    joined: dict[str, Any] = {"meta_info": {"routed_experts": "b"}}
    events: list[dict[str, Any]] = [{"meta_info": {"routed_experts": "a"}}, {"meta_info": {}}, {"text": ""}]
    after_join(joined, None, [*events, {"meta_info": {"routed_experts": "b"}}], "rid")
    assert joined["meta_info"]["routed_experts"] == ["a", "b"]
    plain: dict[str, Any] = {"meta_info": {}}
    after_join(plain, None, events[1:], "rid")
    assert plain == {"meta_info": {}}
