"""Evaluations of real runs: sets with settings of a file, and a function that asks the router itself.

The run with a file of sets also has the data source, the reward and the filter of three examples.
"""

from dataclasses import dataclass
from pathlib import Path

import orjson
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from asyncrl.engines.cluster.ray_files import session_folder
from tests.integration.launcher import QUICKSTART, ROOT, RUN_S, START_S, Launched, Outcome, run
from tests.listeners import showing

pytestmark = pytest.mark.timeout(1800)

STEPS = ("--num-rollout", "2", "--eval-interval", "2", "--no-use-tensorboard", "--eval-prompt-data")
HELD_OUT = ROOT / "configs" / "quickstart" / "heldout.jsonl"
NUM_HELD_OUT = 32
SETS = """
eval:
  defaults: {n_samples_per_eval_prompt: 4, max_response_len: 48}
  datasets:
    - {name: all, path: PATH}
    - {name: long, path: PATH, rm_type: exact, min_new_tokens: 40, top_p: 0.7}
    - {name: greedy, path: PATH, n_samples_per_eval_prompt: 1, temperature: 0, repetition_penalty: 1.2}
"""
EXAMPLES = (
    *("--config", "examples/curriculum/cpu.toml"),
    *("--custom-rm-path", "examples/custom_reward/reward.py:score", "--reward-key", "score"),
    *("--eval-reward-key", "right", "--rollout-skip-special-tokens"),
    *("--dynamic-sampling-filter-path", "examples/custom_filter/filters.py:Useful(most_same=0.75)"),
)
"""A data source, a reward with parts and a filter with arguments."""
FUNCTION = """
import json
import urllib.error
import urllib.request
from pathlib import Path

def status(url):
    try:
        with urllib.request.urlopen(url, timeout=180) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code

def evaluate(args, rollout_id, data_source, evaluation=False):
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    told = {"key": args.sglang_api_key, "without key": status(f"{router}/workers")}
    new = Path(__file__).with_name("told.new")
    new.write_text(json.dumps(told))
    new.rename(new.with_suffix(".json"))
    (data_set,) = args.eval_datasets
    rows = [json.loads(line) for line in open(data_set.path).read().splitlines()][:4]
    lengths = []
    for row in rows:
        params = {"temperature": data_set.temperature, "max_new_tokens": data_set.max_response_len}
        body = json.dumps({"text": row[data_set.input_key], "sampling_params": params}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {args.sglang_api_key}"}
        request = urllib.request.Request(f"{router}/generate", body, headers)
        with urllib.request.urlopen(request, timeout=180) as answer:
            lengths.append(json.load(answer)["meta_info"]["completion_tokens"])
    rewards = [float(length > 0) for length in lengths]
    return {data_set.name: {"rewards": rewards, "truncated": [length == 48 for length in lengths]}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A run whose evaluation function told its key."""

    outcome: Outcome
    key: str
    ray_token: str
    status_without_key: int
    tellers: list[str]
    """The command lines and environments that had a secret in them during the run."""
    ray_logs: Path


@pytest.fixture(scope="module")
def by_function(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    folder = tmp_path_factory.mktemp("asked")
    (folder / "mine.py").write_text(FUNCTION)
    data = ("aime", str(HELD_OUT), "--eval-max-response-len", "48")
    function = ("--eval-function-path", f"{folder}/mine.py:evaluate")
    launched = Launched(folder / "run", (*QUICKSTART, *STEPS, *data, *function))
    launched.wait_until((folder / "told.json").exists, "an evaluation", START_S)
    told = orjson.loads((folder / "told.json").read_bytes())
    token, processes = (Path.home() / ".ray" / "auth_token").read_text(), launched.processes()
    tellers = [each for secret in (told["key"], token) for each in showing(secret, [], processes)]
    ray_logs = max(session_folder().glob(f"session_*_{launched.pid}/logs"))  # an earlier process may have had the id
    outcome = launched.finish(RUN_S)
    assert outcome.code == 0, outcome.output
    return Asked(
        outcome=outcome,
        key=told["key"],
        ray_token=token,
        status_without_key=told["without key"],
        tellers=tellers,
        ray_logs=ray_logs,
    )


@pytest.fixture(scope="module")
def by_sets(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("sets")
    rows = HELD_OUT.read_text().splitlines(keepends=True)[:NUM_HELD_OUT]
    (folder / "heldout.jsonl").write_text("".join(rows))
    (folder / "sets.yaml").write_text(SETS.replace("PATH", str(folder / "heldout.jsonl")))
    outcome = run(folder / "run", *EXAMPLES, *STEPS, "--eval-config", str(folder / "sets.yaml"))
    assert outcome.code == 0, outcome.output
    return outcome


def test_each_set_of_a_file_is_answered_with_its_own_settings(by_sets: Outcome) -> None:
    metrics = by_sets.rows
    assert [row["eval/step"] for row in metrics if "eval/step" in row] == [0, 2]
    for row in (metrics[0], metrics[-1]):
        assert {row[f"eval/{name}/failed"] for name in ("all", "long", "greedy")} == {0}
        assert row["eval/all/pass@4"] >= row["eval/all/pass@1"] == pytest.approx(row["eval/all/reward"])
        assert "eval/greedy/pass@2" not in row
        assert row["eval/long/tokens_mean"] >= 40
        assert row["eval/all/tokens_max"] <= 48
        assert 0 <= row["eval/all/majority@4"] <= 1
        assert row["eval/accuracy"] == pytest.approx(
            sum(row[f"eval/{name}/reward"] for name in ("all", "long", "greedy")) / 3
        )


def test_examples_of_a_source_a_reward_and_a_filter_train_together(by_sets: Outcome) -> None:
    last = by_sets.rows[-1]
    for row in by_sets.rows:
        parts = 0.8 * row["reward/part/right"] + 0.2 * row["reward/part/sound"]
        assert row["reward/mean"] == pytest.approx(parts)
    reasons = {name.removeprefix("filter/"): number for name, number in last.items() if name.startswith("filter/")}
    assert sum(reasons.get(name, 0) for name in ("all_right", "all_wrong", "repeats")) == last["groups/filtered"] > 0
    samples = pq.read_table(by_sets.run_dir / "rollouts" / "step-000001.parquet").to_pylist()
    assert {orjson.loads(sample["metadata"])["level"] for sample in samples} == {0}
    assert {sample["prompt"].partition("+")[2] for sample in samples} <= {"1=", "2="}
    texts = [[each["response"] for each in samples if each["group_id"] == sample["group_id"]] for sample in samples]
    assert max(max(map(group.count, group)) for group in texts) <= 6


def test_a_function_of_slimes_shape_generates_through_the_router(by_function: Asked) -> None:
    assert [row["eval/aime/reward"] for row in by_function.outcome.rows if "eval/step" in row] == [1.0, 1.0]


def test_a_random_key_and_rays_token_are_in_no_file_command_line_or_environment(by_function: Asked) -> None:
    assert len(by_function.key) > 40
    assert by_function.tellers == []
    for secret in (by_function.key, by_function.ray_token):
        assert showing(secret, [by_function.outcome.run_dir, by_function.ray_logs], []) == []


def test_the_router_of_a_run_refuses_requests_without_its_key(by_function: Asked) -> None:
    assert by_function.status_without_key == 401


def test_other_users_enter_neither_the_run_directory_nor_rays(by_function: Asked) -> None:
    assert by_function.outcome.run_dir.stat().st_mode & 0o777 == 0o700
    assert session_folder().parent.stat().st_mode & 0o777 == 0o700
    assert (by_function.ray_logs / "raylet.out").exists()
