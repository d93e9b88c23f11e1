"""The runs of the benchmark: six with a planted fault, ten healthy ones with different settings."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.common.circumstances import ROOT
from benchmarks.planted_faults import stale_engine

MODEL = ROOT / "configs" / "quickstart" / "model"
FAULTY_STEPS = 12
HEALTHY_STEPS = 20
START_S = 600
"""Limit for the start of the processes on a busy machine."""
RIGHT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""The quickstart's model was taught on bare problems."""
WRONG_TEMPLATE = "{% for message in messages %}<im_start>{{ message.role }} {{ message.content }}<im_end>{% endfor %}"
"""The markers of another model, and nothing after them that would begin the answer."""

type Flags = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run: flags that are added to the quickstart's, and what must be prepared in its folder."""

    name: str
    says: str
    is_faulty: bool = False
    flags: Flags = field(default_factory=dict)
    config: str = "configs/quickstart.toml"
    prepare: Callable[[Path], Flags] = lambda folder: {}
    """Prepares files in a folder and returns further flags."""
    environment: Callable[[Path], Mapping[str, str]] = lambda folder: {}

    @property
    def num_steps(self) -> int:
        """The number of training steps."""
        return FAULTY_STEPS if self.is_faulty else HEALTHY_STEPS

    def words(self, folder: Path) -> list[str]:
        """Return the arguments of the run, after its files have been prepared in ``folder``."""
        flags = {
            "config": self.config,
            "num-rollout": self.num_steps,
            "eval-interval": self.num_steps,
            "skip-eval-before-train": True,
            "start-timeout-s": START_S,
            "device": "cpu",
            "progress": "lines",
            **self.flags,
            **self.prepare(folder),
        }
        given = [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in flags.items()]
        return list(chain.from_iterable(given))


def plans() -> Sequence[Plan]:
    """Return all runs, those with faults first."""
    return (*_faulty(), *_healthy())


def _faulty() -> Sequence[Plan]:
    two_engines: Flags = {"rollout-num-gpus": 2}
    return (
        Plan(
            name="wrong-template",
            says="the chat template has the markers of another model, and no prompt to answer",
            is_faulty=True,
            prepare=lambda folder: _with_template(folder, WRONG_TEMPLATE),
        ),
        Plan(
            name="stale-engine",
            says="one of two engines acknowledges weight updates and keeps its old weights",
            is_faulty=True,
            flags=two_engines,
            environment=stale_engine.environment,
        ),
        Plan(
            name="shifted-tokenizer",
            says="the ids of all characters are one higher than the model's",
            is_faulty=True,
            prepare=_with_shifted_ids,
        ),
        Plan(
            name="constant-reward",
            says="the reward is always 1",
            is_faulty=True,
            flags={"custom-rm-path": "benchmarks/planted_faults/always_right.py:reward"},
        ),
        Plan(
            name="collapsed-entropy",
            says="the entropy bonus has the wrong sign",
            is_faulty=True,
            flags={
                "custom-loss-function-path": "benchmarks/planted_faults/wrong_sign.py:loss",
                "lr": 1e-3,
                "lr-warmup-iters": 0,
            },
        ),
        Plan(
            name="large-learning-rate",
            says="the learning rate is a hundred times too large",
            is_faulty=True,
            flags={"lr": 3e-2, "lr-warmup-iters": 0},
        ),
    )


def _healthy() -> Sequence[Plan]:
    two_engines: Flags = {"rollout-num-gpus": 2}
    return (
        Plan(name="plain", says="the quickstart", flags={"seed": 1}),
        Plan(name="synchronous", says="S = 0", flags={"seed": 2, "max-staleness": 0}),
        Plan(name="staleness-3", says="S = 3", flags={"seed": 3, "max-staleness": 3}),
        Plan(
            name="interval-2",
            says="S = 2, weights after every second step",
            flags={"seed": 4, "max-staleness": 2, "update-weights-interval": 2},
        ),
        Plan(
            name="partial",
            says="S = 3, partial rollouts",
            flags={"seed": 5, "max-staleness": 3, "partial-rollout": True, "over-sampling-batch-size": 32},
        ),
        Plan(
            name="filtered",
            says="a filter that drops groups without variance",
            flags={
                "seed": 6,
                "max-staleness": 3,
                "dynamic-sampling-filter-path": "asyncrl.filters.check_reward_nonzero_std",
                "over-sampling-batch-size": 32,
            },
        ),
        Plan(name="two-engines", says="two engines", flags={"seed": 7, **two_engines}),
        Plan(
            name="aborts", says="weight updates that abort requests", flags={"seed": 8, "weight-update-mode": "abort"}
        ),
        Plan(name="mixture", says="the mixture of experts", config="configs/quickstart_moe.toml", flags={"seed": 9}),
        Plan(
            name="right-template",
            says="a chat template that suits the model, and GSPO",
            flags={"seed": 10, "advantage-estimator": "gspo"},
            prepare=lambda folder: _with_template(folder, RIGHT_TEMPLATE),
        ),
    )


def _with_template(folder: Path, template: str) -> Flags:
    model = _copied_model(folder)
    (model / "chat_template.jinja").write_text(template)
    return {"hf-checkpoint": model, "apply-chat-template": True}


def _with_shifted_ids(folder: Path) -> Flags:
    """Give each character the id of the next one; the ids of special tokens stay."""
    model = _copied_model(folder)
    file = model / "tokenizer.json"
    tokenizer: dict[str, Any] = json.loads(file.read_text())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    texts = [text for text in vocabulary if text not in special]
    ids = [vocabulary[text] for text in texts]
    vocabulary.update(zip(texts, [*ids[1:], ids[0]], strict=True))
    file.write_text(json.dumps(tokenizer))
    return {"hf-checkpoint": model}


def _copied_model(folder: Path) -> Path:
    copy = folder / "model"
    shutil.copytree(MODEL, copy)
    return copy
