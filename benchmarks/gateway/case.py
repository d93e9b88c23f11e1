"""One case of ``benchmarks.gateway``, in a separate process: the gateway with turns that cost nothing.

Everything between the client's socket and the engine call is the product's: HTTP, JSON, chat template, tokens, records.
The clients run in another process.  Reads a ``Case`` as JSON from its first argument, writes a ``GatewayMeasurement``.
"""

import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import tokenizers  # type: ignore[import-untyped]
import uvloop

from asyncrl.app.gc_tuning import freeze_startup_objects
from asyncrl.data.tokenizer import TextTokenizer, load_tokenizer
from asyncrl.episodes import EpisodeEnd, EpisodeStart, GeneratedTurn
from asyncrl.metrics.loop_lag import watch_loop
from asyncrl.rollouts.gateway.parts import ModelCard
from asyncrl.rollouts.gateway.server import GatewaySettings, HttpGateway
from asyncrl.rollouts.interfaces import EpisodeAddress
from asyncrl.rollouts.session import EpisodeLimits, EpisodeSession
from asyncrl.types import Chunk, FinishReason, Prompt, SamplingParams, Span, Weights
from benchmarks.controller.meters import LAG_PERIOD_S, AllLags, percentiles_ms, starved_s

END = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template with the structure of most."""
_WORDS = 2000
_WEIGHTS = Weights(version=1, step=1)
_SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The settings of one measurement."""

    api: str
    """``generate``, ``chat`` or ``messages``."""
    in_flight: int
    """Clients, each of which always has a request in progress."""
    num_turns: int
    """Turns of each episode."""
    num_tokens: int
    """Tokens of each answer."""
    turns_per_s: float
    """Turns per second of all engines together."""
    warmup_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayMeasurement:
    """The measured cost of a case."""

    turns: int
    seconds: float
    cpu_s: float
    """CPU seconds of the gateway's process, all threads."""
    starved_s: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    num_context: float
    """Mean number of tokens before a turn."""
    branches: int
    """Branches of the records.  Expected: 0."""


class PacedTurns:
    """``EpisodeTurns`` that are answered at the pace of all engines together, and cost almost nothing."""

    def __init__(self, answer: tuple[int, ...], pace: "Pace") -> None:
        self._answer = answer
        self._logprobs = array("f", [-0.5]) * len(answer)
        self._spans = (Span(weights=_WEIGHTS, start=0, stop=len(answer)),)
        self._pace = pace
        self._num_calls = 0

    @property
    def weights(self) -> Weights:
        """See ``EpisodeTurns``."""
        return _WEIGHTS

    async def generate(
        self,
        token_ids: tuple[int, ...],
        sampling: SamplingParams,
        on_chunk: Callable[[Chunk], None] | None = None,
        routes_from: int = 0,
    ) -> GeneratedTurn:
        """See ``EpisodeTurns``."""
        call, self._num_calls = self._num_calls, self._num_calls + 1
        await self._pace.wait(len(token_ids))
        return GeneratedTurn(
            call=call,
            token_ids=self._answer,
            logprobs=self._logprobs,
            spans=self._spans,
            text="",
            finish=FinishReason.STOP,
            seconds=1.0,
        )


class Pace:
    """Lets turns through one by one, at a steady rate."""

    def __init__(self, turns_per_s: float) -> None:
        self.num_turns = 0
        self.num_context = 0
        self._interval_s = 1 / turns_per_s
        self._next_s = 0.0

    async def wait(self, num_context: int) -> None:
        """Return when the turn would be done; turns are done in the order in which they were asked for."""
        loop = asyncio.get_running_loop()
        self._next_s = max(self._next_s + self._interval_s, loop.time())
        await asyncio.sleep(self._next_s - loop.time())
        self.num_turns += 1
        self.num_context += num_context


class Episodes:
    """Opens a new episode for a client whose last one is over, and hands it to the client's process."""

    def __init__(self, case: Case, tokenizer: TextTokenizer, gateway: HttpGateway) -> None:
        self.pace = Pace(case.turns_per_s)
        self.num_branches = 0
        self._tokenizer = tokenizer
        self._gateway = gateway
        draw = random.Random(case.num_tokens)
        # Seldom words are several tokens: cut to the number that was asked for.
        text = " ".join(draw.choices(_words(), k=case.num_tokens))
        end = tokenizer.encode(END)
        self._answer = (*tokenizer.encode(text)[: case.num_tokens - len(end)], *end)
        self._limits = EpisodeLimits(vocabulary_size=100_000, max_context_len=1_000_000)
        self._open: dict[int, tuple[EpisodeSession, EpisodeAddress]] = {}

    def renew(self, client: int) -> str:
        """Close the client's episode and open another; returns its key."""
        if client in self._open:
            session, address = self._open.pop(client)
            session.close(EpisodeEnd.FINISHED)
            self._gateway.close(address)
            self.num_branches += session.record.branches.total()
        text = f"<|im_start|>user\n{client}<|im_end|>\n<|im_start|>assistant\n"
        prompt = Prompt(row=client, epoch=0, text=text, token_ids=tuple(self._tokenizer.encode(text)), label=None)
        start = EpisodeStart(
            name=f"e{client}", prompt=prompt, sampling=_SAMPLING, index=0, group_size=1, seed=1, group_id=None
        )
        session = EpisodeSession(start, PacedTurns(self._answer, self.pace), self._limits, self._tokenizer.decode)
        address = self._gateway.open(session)
        self._open[client] = (session, address)
        return address.key


def main() -> None:
    """Measure the case in the first argument."""
    sys.stdout.write(orjson.dumps(asdict(measure(Case(**orjson.loads(sys.argv[1]))))).decode() + "\n")


def measure(case: Case) -> GatewayMeasurement:
    """Open the gateway, start the clients, measure, and stop them."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(case, tokenizer_of(Path(folder))))


async def _run(case: Case, tokenizer: TextTokenizer) -> GatewayMeasurement:
    settings = GatewaySettings(
        card=ModelCard(name="model", path="model", max_context_len=1_000_000),
        end_tokens=tuple(tokenizer.encode(END)),
    )
    async with HttpGateway(settings, tokenizer, lambda: _WEIGHTS) as gateway:
        episodes, lags = Episodes(case, tokenizer, gateway), AllLags()
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch_loop(lags, LAG_PERIOD_S), name="loop-lag")
            with clients(case, gateway.port) as process:
                serving = tasks.create_task(_serve(process, episodes), name="episodes")
                await asyncio.sleep(case.warmup_s)
                measured = await _window(case, episodes, lags)
                serving.cancel()
            watching.cancel()
    return measured


async def _window(case: Case, episodes: Episodes, lags: AllLags) -> GatewayMeasurement:
    freeze_startup_objects()
    await asyncio.sleep(1.0)
    lags.late_s.clear()
    pace = episodes.pace
    turns, context, began = pace.num_turns, pace.num_context, time.monotonic()
    starved, cpu = starved_s(), time.process_time()
    await asyncio.sleep(case.measured_s)
    p50, p99, most = percentiles_ms(lags.late_s)
    return GatewayMeasurement(
        turns=pace.num_turns - turns,
        seconds=time.monotonic() - began,
        cpu_s=time.process_time() - cpu,
        starved_s=starved_s() - starved,
        lag_p50_ms=p50,
        lag_p99_ms=p99,
        lag_max_ms=most,
        num_context=(pace.num_context - context) / max(1, pace.num_turns - turns),
        branches=episodes.num_branches,
    )


@contextlib.contextmanager
def clients(case: Case, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process of the clients, and end it."""
    words = {"api": case.api, "port": port, "clients": case.in_flight, "turns": case.num_turns}
    command = (sys.executable, str(Path(__file__).with_name("clients.py")), orjson.dumps(words).decode())
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


async def _serve(process: subprocess.Popen[bytes], episodes: Episodes) -> None:
    """Answer each line of the clients' process, the number of a client, with the key of a new episode."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), process.stdout)
    assert process.stdin is not None
    while line := await lines.readline():
        process.stdin.write(b"%b %b\n" % (line.strip(), episodes.renew(int(line)).encode()))
        process.stdin.flush()


def tokenizer_of(folder: Path) -> TextTokenizer:
    """A byte-level tokenizer of made-up words with a chat template."""
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=4000, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words.train_from_iterator([" ".join(_words())] * 5, trainer)
    words.add_special_tokens(["<|im_start|>", END])
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps({"chat_template": TEMPLATE}))
    return load_tokenizer(folder)


def _words() -> list[str]:
    draw = random.Random(4)
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 6))) for _ in range(_WORDS)]


if __name__ == "__main__":
    main()
