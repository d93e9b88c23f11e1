"""Four weight updates of the real SGLang while it generates long answers: each pause mode keeps every answer."""

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from asyncrl.engines.sglang.client.control import EngineControl
from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.weight_sync.broadcast import BroadcastUpdater, Received
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.disk import DiskUpdater
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.engines.weight_sync.path_check import Meeting
from asyncrl.engines.weight_sync.reach import Reach
from asyncrl.pipeline.sampling.partial_sample import PartialSample
from asyncrl.pipeline.sampling.retry import RetryingEngine
from asyncrl.protocols import RolloutEngine
from asyncrl.types import Chunk, FinishReason, Request, Sample, SamplingParams, Span, Weights
from tests.sglang_server import KEY, ServerControl, Servers, a_free_port
from tests.unit.engines.weight_sync.weight_sets import Teacher, WritesWeights, weight_set

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore::SyntaxWarning")]

Mode = Literal["in_place", "retract", "abort"]
Updater = BroadcastUpdater | DiskUpdater

PROMPT = tuple(range(2, 34))
NUM_SAMPLES = 8
NUM_UPDATES = 4
NUM_TOKENS = 2000
"""Length of an answer: 5 to 10 s on two idle cores, several times as long as the updates."""
BETWEEN_S = 0.1
"""Time between two updates: about 20 tokens of every answer."""
WAIT_S = 180.0
"""Limit for each answer of the server, which takes part of a second on idle cores."""
CLOSE = 1e-4
"""Tolerance of log-probs: engine and teacher agree to 5e-6; two versions are as close for one token in thousands."""


@pytest.fixture(scope="module")
def teacher(servers: Servers) -> Teacher:
    return Teacher(servers.model)


class RecordingEngine:
    """An engine that records its requests."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.requests: list[Request] = []
        self._engine = engine

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        self.requests.append(request)
        return await self._engine.generate(request, on_chunk)

    async def interrupt(self) -> None:
        await self._engine.interrupt()

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        return await self._engine.score(token_ids, start)


@dataclass(kw_only=True)
class UpdatedAnswers:
    """The answers that were in flight during the updates."""

    first: int
    """The version that all answers began with."""
    samples: list[Sample] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    retries: int = 0
    aborts: int = 0
    alive: int = 0
    """Answers in flight when the last update was done."""


class Control(ServerControl):
    """``ServerControl`` that keeps how long the engine reported to have stood still, and whether it met the trainer."""

    def __init__(self, http: HttpClient, url: str) -> None:
        super().__init__(http, url, timeout_s=WAIT_S)
        self.still_s: list[float | None] = []
        self.met: list[bool] = []

    async def meet_trainer(self, where: Meeting) -> bool:
        self.met.append(await super().meet_trainer(where))
        return self.met[-1]

    async def receive_all(
        self, buckets: Sequence[WeightBucket], *, group_name: str, label: str, is_checked: bool, by_part: bool
    ) -> Received:
        received = await super().receive_all(
            buckets, group_name=group_name, label=label, is_checked=is_checked, by_part=by_part
        )
        self.still_s.append(received.still_s)
        return received


def update_in_flight(servers: Servers, mode: Mode, disk: Path | None = None) -> UpdatedAnswers:
    """Publish new weights again and again while answers are in flight; by broadcast, or through the folder ``disk``."""
    return asyncio.run(_update_in_flight(servers, mode, disk))


@contextlib.asynccontextmanager
async def _broadcasting(control: Control, sender: WritesWeights, mode: Mode) -> AsyncIterator[Updater]:
    updater = BroadcastUpdater(
        EngineMembership((control,)),
        sender,
        master_address="127.0.0.1",
        find_port=a_free_port,
        backend="gloo",
        timeout_s=WAIT_S,
        pause_mode="retract" if mode == "retract" else "in_place",
        group_name=uuid.uuid4().hex,
        is_checked=True,
    )
    reach = Reach(sender, master_address="127.0.0.1", find_port=a_free_port, backend="gloo", timeout_s=WAIT_S)
    assert await reach.unmet((control,)) == {}
    assert control.met == [True]
    await updater.connect()
    yield updater
    assert updater.is_direct
    assert control.still_s
    assert all(since_s is not None and 0.0 < since_s < WAIT_S for since_s in control.still_s)
    await control.leave_group(updater.group_name)


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@contextlib.asynccontextmanager
async def _through(disk: Path, control: EngineControl, sender: WritesWeights) -> AsyncIterator[Updater]:
    updater = DiskUpdater(EngineMembership((control,)), sender, folder=disk, timeout_s=WAIT_S)
    await updater.connect()
    yield updater
    assert left_in(disk) == {f"version-{version}" for version in (sender.version - 1, sender.version)}


async def _update_in_flight(servers: Servers, mode: Mode, disk: Path | None) -> UpdatedAnswers:
    async with HttpClient(KEY) as http, contextlib.AsyncExitStack() as stack:
        control = Control(http, servers.engine_url)
        sender = WritesWeights(servers.model, weight_set)
        way = _broadcasting(control, sender, mode) if disk is None else _through(disk, control, sender)
        updater = await stack.enter_async_context(way)
        engine = RecordingEngine(
            SGLangEngine(http, (servers.engine_url,), router_url=servers.router_url, request_timeout_s=WAIT_S)
        )
        published: dict[int, Weights] = {}
        retrying = RetryingEngine(engine, 3, lambda: published[max(published)])

        async def publish() -> None:
            servers.version += 1
            sender.version = servers.version
            weights = Weights(version=servers.version, step=servers.version)
            if mode == "abort":
                await retrying.interrupt()
            await updater.snapshot()
            published[weights.version] = weights  # its tokens may come before publish returns
            await updater.publish(weights)
            retrying.continue_generation()

        await publish()
        answers = UpdatedAnswers(first=servers.version)
        partials = [PartialSample(index, published) for index in range(NUM_SAMPLES)]
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    retrying.generate(_request(partial.index, published[servers.version]), partial.extend)
                )
                for partial in partials
            ]
            async with asyncio.timeout(WAIT_S):
                while not all(partial.token_ids for partial in partials):  # noqa: ASYNC110 -- a remote server
                    await asyncio.sleep(0.01)
            for _ in range(NUM_UPDATES):
                await asyncio.sleep(BETWEEN_S)
                await publish()
            answers.alive = sum(not task.done() for task in running)
    answers.samples = [partial.finish("", task.result(), 1.0) for partial, task in zip(partials, running, strict=True)]
    answers.requests, answers.retries, answers.aborts = engine.requests, retrying.retries, retrying.aborts
    return answers


def _request(seed: int, weights: Weights) -> Request:
    return Request(
        request_id=f"sample-{seed}",
        token_ids=PROMPT,
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=NUM_TOKENS),
        seed=seed,
        weights=weights,
    )


def assert_all_survived(answers: UpdatedAnswers) -> None:
    """Assert that no answer was lost or shortened, and that each has tokens of several versions in order."""
    assert answers.alive == NUM_SAMPLES
    assert answers.retries == 0
    for sample in answers.samples:
        assert (sample.finish, len(sample.token_ids)) == (FinishReason.LENGTH, NUM_TOKENS)
        versions = [span.weights.version for span in sample.spans]
        assert all(before < after for before, after in itertools.pairwise(versions))
        assert (versions[0], versions[-1]) == (answers.first, answers.first + NUM_UPDATES)
        assert len(versions) > NUM_UPDATES // 2  # a busy machine may generate no token between two updates


def assert_spans_are_exact(sample: Sample, score: Callable[[Span], list[float]]) -> None:
    """Assert that each token was generated by the weights of its span, also at the edges of the span."""
    for span in sample.spans:
        scores = score(span)
        assert scores == pytest.approx(sample.logprobs[span.start : span.stop].tolist(), abs=CLOSE)


def scores_of_recomputed_cache(teacher: Teacher, sample: Sample) -> Callable[[Span], list[float]]:
    """Scores of a span's tokens with a KV cache that the span's own weights computed."""
    tokens = (*PROMPT, *sample.token_ids)
    return lambda span: teacher.scores(
        span.weights.version, tokens[: len(PROMPT) + span.stop], len(PROMPT) + span.start
    )


def scores_of_kept_cache(teacher: Teacher, sample: Sample) -> Callable[[Span], list[float]]:
    """Scores of a span's tokens with a KV cache in which the entries of older weights stay."""
    edges = [(span.weights.version, len(PROMPT) + span.stop) for span in sample.spans]
    scores = teacher.scores_with_old_caches(edges, (*PROMPT, *sample.token_ids), len(PROMPT))
    return lambda span: scores[span.start : span.stop]


def moved(sample: Sample, by: int) -> Sample:
    """The same answer with every edge between spans moved ``by`` tokens."""
    stops = [*(span.stop + by for span in sample.spans[:-1]), sample.spans[-1].stop]
    starts = [0, *stops[:-1]]
    spans = tuple(
        Span(weights=span.weights, start=start, stop=stop)
        for span, start, stop in zip(sample.spans, starts, stops, strict=True)
    )
    return Sample(
        index=sample.index,
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        spans=spans,
        text="",
        finish=sample.finish,
        seconds=1.0,
    )


def test_in_place_updates_continue_with_the_old_kv_cache_and_the_new_weights(
    restored_servers: Servers, teacher: Teacher
) -> None:
    answers = update_in_flight(restored_servers, "in_place")
    assert_all_survived(answers)
    assert (answers.aborts, len(answers.requests)) == (0, NUM_SAMPLES)
    for sample in answers.samples:
        assert_spans_are_exact(sample, scores_of_kept_cache(teacher, sample))
    for by in (-1, 1):
        wrong = moved(answers.samples[0], by)
        with pytest.raises(AssertionError):
            assert_spans_are_exact(wrong, scores_of_kept_cache(teacher, wrong))


def test_updates_through_a_disk_keep_requests_in_flight(
    restored_servers: Servers, teacher: Teacher, tmp_path: Path
) -> None:
    answers = update_in_flight(restored_servers, "in_place", tmp_path / "disk")
    assert_all_survived(answers)
    assert (answers.aborts, len(answers.requests)) == (0, NUM_SAMPLES)
    for sample in answers.samples:
        assert_spans_are_exact(sample, scores_of_kept_cache(teacher, sample))


def test_retract_recomputes_the_kv_cache_under_the_new_weights(restored_servers: Servers, teacher: Teacher) -> None:
    answers = update_in_flight(restored_servers, "retract")
    assert_all_survived(answers)
    assert (answers.aborts, len(answers.requests)) == (0, NUM_SAMPLES)
    for sample in answers.samples:
        assert_spans_are_exact(sample, scores_of_recomputed_cache(teacher, sample))


def test_aborted_answers_resume_after_their_last_token(restored_servers: Servers, teacher: Teacher) -> None:
    answers = update_in_flight(restored_servers, "abort")
    assert_all_survived(answers)
    assert answers.aborts == NUM_SAMPLES * NUM_UPDATES
    assert len(answers.requests) == NUM_SAMPLES * (NUM_UPDATES + 1)
    for sample in answers.samples:
        assert_spans_are_exact(sample, scores_of_recomputed_cache(teacher, sample))
        edges = {0, *(span.start for span in sample.spans)}
        for request in answers.requests:
            if request.seed == sample.index:
                written = request.token_ids[len(PROMPT) :]
                assert request.token_ids == (*PROMPT, *sample.token_ids[: len(written)])
                assert request.sampling.max_new_tokens == NUM_TOKENS - len(written)
                assert len(written) in edges
