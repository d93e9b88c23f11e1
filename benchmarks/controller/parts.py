"""The pipeline that ``benchmarks.controller`` measures: the product's, with an instant trainer and instant updates.

Every batch is trained and every step publishes.  The servers then stamp their tokens with the new version, as in a run.
"""

import asyncio
import random
import string
from pathlib import Path

import tokenizers  # type: ignore[import-untyped]

from asyncrl.data.tokenizer import TextTokenizer
from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.metrics.loop_lag import LoopLag
from asyncrl.metrics.timeline import Timeline
from asyncrl.pipeline.parts import Parts, RunPlan
from asyncrl.pipeline.sampling.retry import RetryingEngine
from asyncrl.pipeline.sampling.sampler import Sampler, ServingWeights
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.pipeline.scheduling.admission import Limits
from asyncrl.pipeline.scheduling.budgets import Budgets
from asyncrl.pipeline.scheduling.scheduler import Scheduler
from asyncrl.types import Batch, Prompt, Sample, SamplingParams, ScoredGroup, TrainReport, UpdateReport, Weights
from benchmarks.controller.answering_server import VOCABULARY

PROMPT_TOKENS = 512
"""Tokens of each prompt: a question of some hundred words."""
GROUP_SIZE = 8
"""Samples per prompt, as in slime's examples."""
GROUPS_PER_STEP = 16
"""128 samples per step: at 400 samples/s three steps a second, more than a trainer asks of the loop."""
_NEVER = 1_000_000_000
"""More steps than a case can reach, since the clock ends it."""
_RETRIES = 3
"""The product's default; no retry is expected."""
REQUEST_TIMEOUT_S = 300.0
"""Seconds; the product's default, which no request here comes near."""
_UPDATE_S = 60.0
"""Seconds for an answer that is sent at once, also on a busy machine."""


def parts_for(
    in_flight: int, num_tokens: int, http: HttpClient, urls: tuple[str, ...], timeline: Timeline, lag: LoopLag
) -> Parts:
    """Parts of a run that keeps ``in_flight`` samples on the servers at ``urls``; staleness never limits it."""
    engine = SGLangEngine(http, urls, router_url=None, request_timeout_s=REQUEST_TIMEOUT_S)
    slots, serving = Slots(in_flight), ServingWeights(Weights(version=0, step=0))
    retrying = RetryingEngine(engine, _RETRIES, lambda: serving.now)
    sampler = Sampler(
        engine=retrying,
        reward=_constant,
        reward_timeout_s=60.0,
        tokenizer=TextTokenizer(made_up_words(), None),
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=num_tokens),
        slots=slots,
        serving=serving,
        timeline=timeline,
        seed=1,
    )
    scheduler = Scheduler(
        prompts=Questions(),
        sampler=sampler,
        keep=_keep_all,
        limits=Limits(
            groups_per_step=GROUPS_PER_STEP,
            group_size=GROUP_SIZE,
            max_staleness=2 + 2 * in_flight // (GROUP_SIZE * GROUPS_PER_STEP),
            num_steps=_NEVER,
        ),
        budgets=Budgets(max_failed_groups=1, max_filtered_groups=1, watchdog_timeout_s=600.0),
        slots=slots,
        serving=serving,
        timeline=timeline,
    )
    return Parts(
        scheduler=scheduler,
        evaluator=None,
        engine=retrying,
        trainer=InstantTrainer(),
        updater=InstantUpdater(http, urls),
        slots=slots,
        serving=serving,
        timeline=timeline,
        loop_lag=lag,
    )


def plan_for(folder: Path) -> RunPlan:
    """A run of endless steps, with an update after each."""
    return RunPlan(
        num_steps=_NEVER,
        update_weights_interval=1,
        eval_interval=None,
        eval_before_train=False,
        temperature=0.9,  # not 1: the pipeline then asks for no log-probs, which these servers could not compute
        save_to=folder,
    )


class InstantTrainer:
    """A ``Trainer`` that takes no time and returns the engine's log-probs."""

    async def train(self, batch: Batch) -> TrainReport:
        """See ``Trainer.train``."""
        await asyncio.sleep(0)
        logprobs = tuple(scored.sample.logprobs for group in batch.groups for scored in group.samples)
        return TrainReport(
            loss=0.0, grad_norm=0.0, clip_fraction=0.0, entropy=0.0, learning_rate=0.0, seconds=0.0, logprobs=logprobs
        )

    async def save(self, path: Path) -> None:
        """See ``Trainer.save``."""


class InstantUpdater:
    """A ``WeightUpdater`` without weights: it sends the new version to each server in one request."""

    def __init__(self, http: HttpClient, urls: tuple[str, ...]) -> None:
        self._http = http
        self._urls = urls

    async def snapshot(self) -> bool:
        """See ``WeightUpdater.snapshot``."""
        return True

    async def resnapshot(self) -> bool:
        """See ``WeightUpdater.resnapshot``."""
        return True

    def trainer_restarted(self, address: str) -> None:
        """See ``WeightUpdater.trainer_restarted``."""

    async def wait_for_rejoined(self) -> None:
        """See ``WeightUpdater.wait_for_rejoined``."""
        await asyncio.Event().wait()

    async def publish(self, weights: Weights) -> UpdateReport:
        """See ``WeightUpdater.publish``."""
        body = {"new_version": str(weights.version)}
        async with asyncio.TaskGroup() as posts:
            for url in self._urls:
                posts.create_task(self._http.command(f"{url}/update_weight_version", body, _UPDATE_S))
        return UpdateReport(pause_s=0.0, total_s=0.0, num_bytes=0)


class Questions:
    """A ``PromptSource`` that repeats one question forever."""

    def __init__(self) -> None:
        self._row = 0
        self._token_ids = tuple(random.Random(3).choices(range(256, VOCABULARY), k=PROMPT_TOKENS))

    async def ready(self) -> None:
        """See ``PromptSource.ready``."""

    def take(self) -> Prompt:
        """See ``PromptSource.take``."""
        self._row += 1
        return Prompt(row=self._row, epoch=0, text="a question", token_ids=self._token_ids, label=None)


def made_up_words() -> tokenizers.Tokenizer:
    """A byte-level vocabulary, the kind that Qwen and most others have; its words are random letters."""
    draw = random.Random(4)
    vocabulary = {byte: place for place, byte in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    while len(vocabulary) < VOCABULARY:
        # With the blank in front (written as U+0120) 2 to 7 characters: English has 4 to 5 per token.
        letters = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 6)))
        vocabulary.setdefault(f"\u0120{letters}", len(vocabulary))
    words = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    words.decoder = tokenizers.decoders.ByteLevel()
    return words


async def _constant(prompt: Prompt, sample: Sample) -> float:
    return 1.0


def _keep_all(group: ScoredGroup) -> str | None:
    return None
