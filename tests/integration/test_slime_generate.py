"""slime's own single turn inside a user's function: ``GenerateState`` with a real tokenizer, and ``generate``."""

import contextlib
import importlib
from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer

from asyncrl.compat.episodes.program import slime_program
from asyncrl.compat.episodes.trajectories import outcome_of
from asyncrl.compat.slime_args import completed
from asyncrl.plugins.resolve import named_object
from asyncrl.types import GroupId
from tests.unit.compat.episodes.test_slime_programs import SETTINGS, Call
from tests.unit.rollouts.gateway.world import World, run

SOURCE = """
import copy

from slime.rollout.sglang_rollout import GenerateState, generate

async def fan_out(args, sample, sampling_params):
    state = GenerateState(args)
    assert GenerateState(args) is state and state.processor is None and not state.aborted
    texts = (args.rollout_skip_special_tokens, state.sampling_params["skip_special_tokens"])
    assert (*texts, sampling_params["skip_special_tokens"]) == (False, False, False)  # None strips end tokens
    chat = [{"role": "user", "content": "Hi"}]
    ids = state.tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    text = state.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert isinstance(ids, list) and ids == state.tokenizer.encode(text)
    async with state.semaphore:
        first = await generate(args, sample, sampling_params)
    assert first.status is sample.Status.COMPLETED
    assert first.tokens[: -first.response_length] == state.tokenizer("Hi")["input_ids"]
    copies = [copy.deepcopy(first) for _ in range(1 + sample.index % 3)]
    for each in copies:
        each.rollout_id = sample.index
    return copies
"""


def test_generate_of_slime_runs_one_turn_behind_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(SOURCE)
    (tmp_path / "model").mkdir()
    world = World(tmp_path / "model")
    settings = SETTINGS | {
        "hf_checkpoint": str(tmp_path / "model"),
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 64,
        "rollout_stop_token_ids": (),
        "rollout_seed": 1,
    }
    AutoTokenizer.from_pretrained(tmp_path / "model")  # imports torch, which takes longer than the gateway waits
    program = slime_program(f"{tmp_path}/user.py:fan_out", completed(settings, 512), named_object)

    async def test(world: World) -> None:
        client = world.episode(["one<|im_end|>"], "Hi")
        client.session.start = replace(client.session.start, index=1, group_size=2, group_id=GroupId(2))
        async with contextlib.aclosing(importlib.import_module("slime.utils.http_utils").client()):
            result = await program(Call(client.session.start, client.address))
        found = outcome_of(client.session, result).trajectories
        assert len(found) == 3
        assert {each.sample.token_ids for each in found} == {tuple(world.tokenizer.encode("one<|im_end|>"))}
        assert all(each.sample.prompt_ids is None and all(each.loss_mask) for each in found)

    run(test, world)
