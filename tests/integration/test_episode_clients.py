"""Clients of the model that know nothing of training drive it on a CPU, while an engine is killed."""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from asyncrl.data.tokenizer import load_tokenizer
from tests.integration.episodes import clients
from tests.integration.episodes.thinking_model import IDS, thinking_model
from tests.integration.launcher import FATES, RUN_S, START_S, Launched, Outcome
from tests.listeners import Listener, listening, not_found, rows, showing, unlisted
from tests.programs import words_of

STEPS, GROUPS = 2, 3
MODULE = "tests.integration.episodes.clients"
FLAGS = f"""
--prompt-data configs/quickstart/train.jsonl --device cpu --actor-num-gpus-per-node 1 --rollout-num-gpus 2
--num-rollout {STEPS} --rollout-batch-size {GROUPS} --n-samples-per-prompt {len(clients.CLIENTS)}
--rollout-max-response-len 128 --max-staleness 0 --lr 1e-4 --no-use-tensorboard
--sglang-server-concurrency 32 --sglang-max-total-tokens 65536 --sglang-tool-call-parser hermes
--router-policy round_robin
"""
"""The prompt data is required; the data source does not read it.  Each engine gets every other request."""
SECRETS = f'sglang-api-key = "{clients.API_KEY}"\n'
"""A file of the run's user; on the command line, every user of the machine would see the key."""
END_THINK, END = IDS["</think>"], IDS["<|im_end|>"]
SENT_S = 10.0
"""Time in which episodes that may begin send their first request, on a machine that is busy with two other runs."""
DROPPING = ("verifiers", "ten questions")
"""Clients that ask further questions: the template then shows the answers before without their thinking."""

pytestmark = pytest.mark.timeout(2700)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """A run, and all samples that its reward saw."""

    outcome: Outcome
    samples: list[dict[str, Any]]
    model: Path
    listeners: list[Listener]
    """The sockets on which the processes of the run listened after the first step."""
    tellers: list[str]
    """The command lines and environments that had the key in them then."""

    def of(self, *names: str) -> Iterator[list[dict[str, Any]]]:
        """The samples of each episode of these clients."""
        episodes = defaultdict(list)
        for sample in self.samples:
            if sample["metadata"]["client"] in names:
                episodes[sample["group"], sample["rollout"]].append(sample)
        return iter(episodes.values())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Clients:
    """Two steps; an engine was killed that had requests of the second one."""
    folder = tmp_path_factory.mktemp("clients")
    model, samples = thinking_model(folder / "model"), folder / "samples.jsonl"
    (folder / "agents.toml").write_text(SECRETS)
    first = GROUPS * len(clients.CLIENTS)
    functions = {
        "--config": str(folder / "agents.toml"),
        "--hf-checkpoint": str(model),
        "--data-source-path": f"asyncrl.rollouts.environments.verifiers:prompts(env_id='{clients.ENVIRONMENT}')",
        "--custom-generate-function-path": f"{MODULE}:held_after(first={first}, folder='{folder}')",
        "--custom-rm-path": f"{MODULE}:scored(into='{samples}', tokenizer='{model}')",
    }
    launched = Launched(folder / "run", [*FLAGS.split(), *(word for pair in functions.items() for word in pair)])
    launched.wait_for_steps(1, START_S)
    processes = launched.processes()
    listeners = listening(processes, rows())
    tellers = showing(clients.API_KEY, [], processes)
    victim = server(launched)
    launched.wait_until((folder / "held").exists, "an episode of the second step", START_S)
    victim.suspend()  # no turn that it gets ends
    (folder / "go").touch()
    time.sleep(SENT_S)
    victim.kill()
    outcome = launched.finish(RUN_S)
    assert outcome.code == 0, outcome.output
    return Clients(outcome=outcome, samples=_read(samples), model=model, listeners=listeners, tellers=tellers)


def _read(samples: Path) -> list[dict[str, Any]]:
    lines = samples.read_bytes().split(b"\n")[:-1] if samples.exists() else []
    return [orjson.loads(line) for line in lines]


def server(launched: Launched) -> psutil.Process:
    """The main process of one engine of the run."""
    return next(process for process in launched.members() if clients.SERVER in words_of(process))


def test_every_client_trains_although_an_engine_is_killed(trained: Clients) -> None:
    rows = trained.outcome.rows
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert {sample["metadata"]["client"] for sample in trained.samples} == {*clients.CLIENTS}
    for name in clients.CLIENTS:
        assert len([*trained.of(name)]) == STEPS * GROUPS
    assert rows[-1]["episodes/finished"] == STEPS * GROUPS * len(clients.CLIENTS)
    assert (rows[-1]["groups/trained"], rows[-1]["groups/failed"]) == (STEPS * GROUPS, 0)
    assert rows[-1]["retries"] > 0
    assert "was ended by signal 9" in (trained.outcome.run_dir / "run.log").read_text()
    assert all(math.isfinite(row["train/grad_norm"]) and row["train/grad_norm"] > 0 for row in rows)
    assert trained.outcome.left == ()


def test_the_run_listens_where_the_page_on_security_says(trained: Clients) -> None:
    table = rows()
    assert unlisted(trained.listeners, table) == []
    assert not_found(trained.listeners, table) == []


def test_a_given_key_is_in_no_file_command_line_or_environment(trained: Clients) -> None:
    assert trained.tellers == []
    run_dir = trained.outcome.run_dir
    assert "# sglang-api-key is secret and not written" in next(run_dir.glob("*.toml")).read_text()
    assert showing(clients.API_KEY, [run_dir], []) == []


def test_every_token_of_episodes_is_accounted_for(trained: Clients) -> None:
    for row in trained.outcome.rows:
        assert row["tokens/generated"] == sum(row[f"tokens/{fate}"] for fate in FATES)
        assert row["lag/max"] == 0
    written = sum(len(ids) for turns in map(_turns, trained.of(*clients.CLIENTS)) for _, ids in turns.values())
    assert trained.outcome.rows[-1]["tokens/trained"] == written


def test_an_engine_scores_every_trained_token_alike(trained: Clients) -> None:
    apart = [
        abs(sample["recorded"][place] - sample["scored"][place])
        for sample in trained.samples
        for _, start, stop in sample["turns"]
        for place in range(start, stop)
    ]
    assert len(apart) > 1000
    assert max(apart) < 1e-4
    compared = [row["train/logprob_diff"] for row in trained.outcome.rows if "train/logprob_diff" in row]
    assert compared
    assert max(compared) < 1e-4


def test_ten_turns_show_the_engine_the_recorded_tokens_of_what_the_template_keeps(trained: Clients) -> None:
    encode = load_tokenizer(trained.model).encode
    for samples in trained.of("ten questions"):
        turns = _turns(samples)
        questions = samples[0]["metadata"]["questions"]
        assert [*turns] == [*range(clients.NUM_QUESTIONS)]
        assert len(questions) == clients.NUM_QUESTIONS
        shown: list[int] = []
        for call, question in enumerate(questions):
            shown += encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
            context, written = turns[call]
            assert context == shown
            shown += [*written[_thinking(written) :], *([] if written[-1] == END else [END]), IDS["\n"]]


def test_every_dropped_token_is_counted_and_none_is_tokenised_again(trained: Clients) -> None:
    rows = trained.outcome.rows
    found = {name: sum(row.get(f"episodes/{name}", 0) for row in rows) for name in ("dropped_tokens", "tool_calls")}
    turns = [_turns(samples) for samples in trained.of(*DROPPING)]
    dropped = [_thinking(ids) for each in turns for _, ids in [*each.values()][:-1]]
    assert found["dropped_tokens"] == sum(dropped) > 0
    assert sum(row.get("episodes/branches/template", 0) for row in rows) == sum(size > 0 for size in dropped)
    assert sum(row.get("episodes/retokenized_tokens", 0) for row in rows) == 0
    assert {name for row in rows for name in row if "/branches/" in name} == {"episodes/branches/template"}
    assert found["tool_calls"] > 0
    assert all(len(samples) == 1 for samples in trained.of(*{*clients.CLIENTS} - {*DROPPING}))


@pytest.mark.skipif("strands" not in clients.CLIENTS, reason="strands-sglang is not installed")
def test_strands_recorded_the_tokens_that_were_trained(trained: Clients) -> None:
    for (sample,) in trained.of("strands"):
        prompt_ids, metadata = sample["prompt_ids"], sample["metadata"]
        assert metadata["strands_ids"] == prompt_ids + sample["token_ids"]
        generated = {place for _, start, stop in sample["turns"] for place in range(start, stop)}
        mask = [place in generated for place in range(-len(prompt_ids), len(sample["token_ids"]))]
        assert [bool(each) for each in metadata["strands_mask"]] == mask


def test_the_model_writes_what_would_be_tokenised_otherwise(trained: Clients) -> None:
    """The test above would not see text that is tokenised again if that gave the same tokens."""
    tokenizer = load_tokenizer(trained.model)
    written = [ids for samples in trained.of(*DROPPING) for _, ids in _turns(samples).values()]
    assert any(tokenizer.encode(tokenizer.decode(tuple(ids))) != ids for ids in written)


def _turns(samples: Sequence[dict[str, Any]]) -> dict[int, tuple[list[int], list[int]]]:
    """The tokens before each turn of an episode, and its own, by call."""
    found = {}
    for sample in samples:
        for call, start, stop in sample["turns"]:
            before = [*sample["prompt_ids"], *sample["token_ids"][:start]]
            found[call] = (before, sample["token_ids"][start:stop])
    return dict(sorted(found.items()))


def _thinking(written: Sequence[int]) -> int:
    """Tokens up to the last end of thinking, as Qwen3's template cuts; 0 for an answer that was cut before it."""
    return len(written) - written[::-1].index(END_THINK) if END_THINK in written else 0
