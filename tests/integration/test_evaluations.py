"""Evaluations of real runs: sets with settings of a file, and a function that asks the router itself."""

from pathlib import Path

import pytest

from tests.integration.launcher import QUICKSTART, ROOT, Outcome, run

pytestmark = pytest.mark.timeout(600)

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
FUNCTION = """
import json
import urllib.request

def evaluate(args, rollout_id, data_source, evaluation=False):
    (data_set,) = args.eval_datasets
    rows = [json.loads(line) for line in open(data_set.path).read().splitlines()][:4]
    lengths = []
    for row in rows:
        params = {"temperature": data_set.temperature, "max_new_tokens": data_set.max_response_len}
        body = json.dumps({"text": row[data_set.input_key], "sampling_params": params}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {args.sglang_api_key}"}
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        request = urllib.request.Request(url, body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            lengths.append(json.load(answer)["meta_info"]["completion_tokens"])
    rewards = [float(length > 0) for length in lengths]
    return {data_set.name: {"rewards": rewards, "truncated": [length == 48 for length in lengths]}}
"""


def trained(folder: Path, *flags: str) -> Outcome:
    outcome = run(folder / "run", *QUICKSTART, *STEPS, *flags)
    assert outcome.code == 0, outcome.output
    return outcome


def test_each_set_of_a_file_is_answered_with_its_own_settings(tmp_path: Path) -> None:
    rows = HELD_OUT.read_text().splitlines(keepends=True)[:NUM_HELD_OUT]
    (tmp_path / "heldout.jsonl").write_text("".join(rows))
    (tmp_path / "sets.yaml").write_text(SETS.replace("PATH", str(tmp_path / "heldout.jsonl")))
    metrics = trained(tmp_path, "--eval-config", str(tmp_path / "sets.yaml")).rows
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


def test_a_function_of_slimes_shape_generates_through_the_router(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    data = ("aime", str(HELD_OUT), "--eval-max-response-len", "48")
    rows = trained(tmp_path, *data, "--eval-function-path", f"{tmp_path}/mine.py:evaluate").rows
    assert [row["eval/aime/reward"] for row in rows if "eval/step" in row] == [1.0, 1.0]
