"""Functions of slime's shape run as episodes, over the gateway, as in the process of user code."""

import contextlib
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.compat.episodes.program import SlimeProgram, slime_program
from asyncrl.compat.episodes.trajectories import outcome_of
from asyncrl.compat.slime_args import completed
from asyncrl.episodes import EpisodeOutcome, EpisodeStart
from asyncrl.errors import EpisodeFailed, PluginError
from asyncrl.plugins.resolve import named_object
from asyncrl.rollouts.interfaces import EpisodeAddress, SlimeResult
from asyncrl.types import GroupId
from tests.unit.rollouts.gateway.world import Script, World, run

HEAD = """
from slime.utils.http_utils import get, post
from slime.utils.types import Sample

def ids(output):
    return [each[1] for each in output["meta_info"]["output_token_logprobs"]]

def logprobs(output):
    return [each[0] for each in output["meta_info"]["output_token_logprobs"]]

def url(args):
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
"""
TWO_TURNS = """
async def generate(args, sample, sampling_params):
    prompt = [5, 6, 7]
    sample.tokens = list(prompt)
    for turn in range(2):
        payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url(args), payload)
        sample.append_response_tokens(
            args, tokens=ids(output), log_probs=logprobs(output), meta_info=output["meta_info"], text=output["text"]
        )
        if turn == 0:
            sample.append_response_tokens(args, tokens=[8, 9], trainable=False, text=" seen ")
    sample.tool_calls = 1
    sample.client = object()
    sampling_params["max_new_tokens"] = 0
    args.mine = sample
    return sample

async def reward_func(args, sample, **kwargs):
    assert args.mine is sample
    return {"score": float(sample.tool_calls), "text": sample.response}
"""
SETTINGS: dict[str, Any] = {
    "hf_checkpoint": "nowhere",
    "rm_type": None,
    "custom_rm_path": None,
    "reward_key": None,
    "group_rm": False,
    "rollout_stop": ("</call>",),
    "partial_rollout": True,
    "n_samples_per_prompt": 2,
    "rollout_skip_special_tokens": None,  # as without the flag
}


@dataclass(frozen=True, slots=True)
class Call:
    """An episode as its program sees it."""

    start: EpisodeStart
    address: EpisodeAddress
    generate: Any = None


@dataclass(frozen=True, slots=True)
class Played:
    outcome: EpisodeOutcome
    result: SlimeResult
    asked: Sequence[Any]


@pytest.fixture(autouse=True)
def _paths() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


def program_of(folder: Path, source: str, function: str = ":generate", **settings: Any) -> SlimeProgram:
    file = folder / "user.py"
    file.write_text(HEAD + source)
    rm = {name: f"{file}:{value}" for name, value in settings.items() if name == "custom_rm_path"}
    eval_paths = {name: f"{file}:{each}" for name, each in settings.pop("eval_rm_paths", {}).items()}
    return slime_program(
        f"{file}{function}", completed(SETTINGS | settings | rm, 512), named_object, eval_rm_paths=eval_paths
    )


def play(
    folder: Path,
    source: str,
    script: Script | Sequence[str] = ("one", "two"),
    function: str = ":generate",
    change: Callable[[EpisodeStart], EpisodeStart] = lambda start: start,
    reward_key: str | None = None,
    **settings: Any,
) -> Played:
    """Run one episode of a function over the gateway."""
    program = program_of(folder, source, function, **settings)
    world, played = World(folder), []

    async def scenario(world: World) -> None:
        client = world.episode(script, "Hi")
        start = change(replace(client.session.start, index=1, group_size=2, group_id=GroupId(3)))
        client.session.start = start
        async with contextlib.aclosing(importlib.import_module("slime.utils.http_utils").client()):
            result = await program(Call(start, client.address))
        outcome = outcome_of(client.session, result, reward_key=reward_key, eval_reward_key="held")
        played.append(Played(outcome, result, client.turns.asked))

    run(scenario, world)
    return played[0]


def test_a_function_of_two_turns_is_one_exact_trajectory_with_its_reward(tmp_path: Path) -> None:
    played = play(tmp_path, TWO_TURNS, custom_rm_path="reward_func", reward_key="score")
    (found,) = played.outcome.trajectories
    (first, _), (second, _) = played.asked
    assert first == (5, 6, 7)
    full = (found.sample.prompt_ids or ()) + found.sample.token_ids
    assert full[: len(second)] == second
    assert [turn.call for turn in found.sample.turns] == [0, 1]
    assert sum(found.loss_mask) == found.sample.num_generated == len(found.sample.token_ids) - 2
    assert not any(map(math.isnan, found.sample.logprobs))
    assert found.reward is not None and found.reward.value == 1.0
    assert found.sample.text == "one seen two"
    assert played.outcome.metrics == {}


@pytest.mark.parametrize("needs_tokenizer", [True, False])
def test_transformers_is_imported_ahead_if_a_file_may_ask_for_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs_tokenizer: bool
) -> None:
    monkeypatch.delitem(sys.modules, "slime.utils.processing_utils", raising=False)
    imports = "from slime.utils.processing_utils import load_tokenizer\n" if needs_tokenizer else ""
    program = program_of(tmp_path, f"{imports}async def generate(args, sample, sampling_params): return sample")
    asked: list[str] = []

    def imported(name: str) -> Any:
        asked.append(name)
        return SimpleNamespace(AutoTokenizer=None)

    monkeypatch.setattr("asyncrl.compat.episodes.program.import_module", imported)
    program.warm()
    assert asked == ["transformers"] * needs_tokenizer


def test_only_plain_attributes_leave_the_process_and_the_rest_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = TWO_TURNS.replace("sample.client", "sample.connection")
    for _ in range(2):
        (state,) = play(tmp_path, source).result.samples
        assert state["tool_calls"] == 1
        assert "connection" not in state
    assert caplog.text.count("sample.connection holds a object") == 1


def test_args_have_slimes_names_and_the_episodes_address(tmp_path: Path) -> None:
    source = """
async def generate(args, sample, sampling_params, evaluation=False):
    assert evaluation is False
    assert args.rollout_max_context_len == args.eval_max_context_len == 512
    assert args.partial_rollout is False and args.ci_test is False and "ci_test" in args
    assert args.rollout_stop == ["</call>"]
    assert getattr(args, "no_such_name", 7) == 7
    assert args.sglang_router_ip.startswith(sample.session_id + ":")
    assert sampling_params["no_stop_trim"] is True and sampling_params["stop"] is None
    assert (sample.index, sample.group_index, sample.prompt, sample.label) == (7, 3, "Hi", "42")
    assert sample.status is Sample.Status.PENDING and sample.tokens == []
    args.rollout_stop.append("changed")
    payload = {"input_ids": [5], "sampling_params": sampling_params, "return_logprob": True}
    output = await post(url(args), payload)
    sample.tokens, sample.response_length = [5] + ids(output), len(ids(output))
    return sample
"""
    for _ in range(2):
        assert play(tmp_path, source).outcome.trajectories[0].reward is None


def test_the_printed_shape_gets_a_list_and_may_leave_the_tokens_to_the_record(tmp_path: Path) -> None:
    source = """
async def custom_generate(args, samples, evaluation=False):
    for sample in samples:
        answer = await post(url(args), {"text": sample.prompt, "sampling_params": {"max_new_tokens": 8}})
        sample.response = answer["text"] + "!"
        sample.reward = 0.25
    return samples
"""
    played = play(tmp_path, source, function="")
    (found,) = played.outcome.trajectories
    assert played.result.is_list is False
    assert (found.sample.text, found.reward and found.reward.value) == ("one!", 0.25)
    assert all(found.loss_mask)


def test_fan_out_is_scored_once_with_the_list_of_samples_without_reward(tmp_path: Path) -> None:
    source = """
import copy

async def generate(args, sample, sampling_params):
    found = []
    for place in range(3):
        each = copy.deepcopy(sample)
        each.tokens = [5, 6, 7 + place]
        payload = {"input_ids": each.tokens, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url(args), payload)
        each.append_response_tokens(args, tokens=ids(output), log_probs=logprobs(output), meta_info=output["meta_info"])
        each.reward = 9.0 if place == 1 else None
        found.append(each)
    return found

async def reward_func(args, samples, **kwargs):
    assert [sample.tokens[2] for sample in samples] == [7, 9]
    return [1.0, 2.0]
"""
    played = play(tmp_path, source, ("a", "b", "c"), custom_rm_path="reward_func")
    rewards = [each.reward.value if each.reward else None for each in played.outcome.trajectories]
    assert rewards == [1.0, 9.0, 2.0]
    assert [each.sample.prompt_ids for each in played.outcome.trajectories] == [(5, 6, 7), (5, 6, 8), (5, 6, 9)]


def test_an_evaluation_has_its_own_reward_function_and_key(tmp_path: Path) -> None:
    source = (
        TWO_TURNS.replace("(args, sample, sampling_params)", "(args, sample, sampling_params, evaluation=False)")
        + """
async def held(args, sample, **kwargs):
    assert sample.custom_rm_path.endswith(":held")
    return {"held": 0.5}
"""
    )
    played = play(
        tmp_path,
        source,
        change=lambda start: replace(start, group_id=None, data_set="set"),
        custom_rm_path="reward_func",
        eval_rm_paths={"set": "held"},
    )
    (found,) = played.outcome.trajectories
    assert found.reward is not None and found.reward.value == 0.5


def test_rewards_that_cannot_run_here_are_left_to_the_controller(tmp_path: Path) -> None:
    source = TWO_TURNS.replace("async def reward_func", "def reward_func")
    assert play(tmp_path, source, custom_rm_path="reward_func").outcome.trajectories[0].reward is None
    assert play(tmp_path, TWO_TURNS, custom_rm_path="reward_func", group_rm=True).outcome.trajectories[0].reward is None


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("return None", "the function returned a NoneType; return the Sample, or a list of Samples"),
        ("return [sample, 3]", "the function returned a int; return the Sample"),
    ],
)
def test_another_result_is_one_line(tmp_path: Path, body: str, line: str) -> None:
    with pytest.raises(EpisodeFailed, match=line):
        play(tmp_path, f"async def generate(args, sample, sampling_params):\n    {body}\n")


def test_a_function_without_async_is_named(tmp_path: Path) -> None:
    with pytest.raises(EpisodeFailed, match="write it with 'async def'"):
        play(tmp_path, "def generate(args, sample, sampling_params):\n    return sample\n")


@pytest.mark.parametrize(
    ("source", "function", "line"),
    [
        ("async def generate(args, a, b, c, d):\n    pass\n", ":generate", "must take .args, sample, sampling_params."),
        ("async def one(args, s, p):\n    pass\nasync def two(args, s, p):\n    pass\n", "", "it has: one, two"),
        ("import os\n", "", "it has none that is written with 'async def'"),
        ("from slime.agent.adapters import X\n", ":generate", "user.py:13 needs slime.agent, which asyncrl does not"),
    ],
)
def test_a_wrong_file_is_one_line_before_anything_starts(tmp_path: Path, source: str, function: str, line: str) -> None:
    with pytest.raises(PluginError, match=line):
        program_of(tmp_path, source, function)


def test_a_file_alone_and_its_neighbours_are_found(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_user.py").write_text("ANSWER = [5, 6]\n")
    source = """
from neighbour_of_user import ANSWER

async def helper(sample):
    pass

async def my_rollout(args, sample, sampling_params):
    sample.loss_mask = ANSWER
    return sample
"""
    with pytest.raises(EpisodeFailed, match="no response, and the function never called the model"):
        play(tmp_path, source, function="")


def test_imports_inside_functions_that_will_fail_are_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program_of(
        tmp_path,
        "async def generate(args, sample, p):\n    from slime.agent import harness\n",
    )
    assert "user.py:14 needs slime.agent.harness, which asyncrl does not have" in caplog.text


def test_an_installed_slime_and_a_folder_slime_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [each for each in sys.modules if each.partition(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)
    other = SimpleNamespace(__file__=str(tmp_path / "slime" / "__init__.py"))
    monkeypatch.setitem(sys.modules, "slime", other)
    played = play(tmp_path, TWO_TURNS)
    assert len(played.outcome.trajectories) == 1


@pytest.mark.parametrize("where", ["custom_rm_path", "eval_rm_paths"])
def test_a_reward_that_is_not_there_is_named_with_its_flag(tmp_path: Path, where: str) -> None:
    settings: Any = {"custom_rm_path": "reward_fun"} if where == "custom_rm_path" else {where: {"held": "reward_fun"}}
    with pytest.raises(PluginError) as error:
        program_of(tmp_path, TWO_TURNS, **settings)
    file = tmp_path / "user.py"
    start = f"--custom-rm-path '{file}:reward_fun': {file} has no function 'reward_fun'; it has: "
    assert str(error.value).startswith(start)
