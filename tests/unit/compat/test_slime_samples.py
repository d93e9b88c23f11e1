"""slime's view of a sample: open, one object per answer, with numbers that are unique in the run."""

import copy
import gc
import pickle
from array import array
from dataclasses import fields, replace

import pytest

from asyncrl.buffer import masked_until
from asyncrl.compat import Sample, SlimeArgs
from asyncrl.compat.slime_sample import sample_of
from asyncrl.compat.slime_views import _VIEWS, group_to_slime, to_slime
from asyncrl.types import FinishReason, GroupId, Prompt, ScoredGroup, Span, Weights
from asyncrl.types import Sample as OurSample
from tests.unit.scored_groups import group

SLIMES = (
    "group_index index rollout_id prompt tokens multimodal_inputs multimodal_train_inputs multimodal_train_input_id "
    "apply_chat_template_kwargs response response_length label reward loss_mask weight_versions rollout_log_probs "
    "rollout_top_p_token_ids rollout_top_p_token_offsets rollout_routed_experts remove_sample teacher_log_probs status "
    "metadata generate_function_path custom_rm_path train_metadata session_id non_generation_time spec_info "
    "prefix_cache_info"
)


def test_fields_are_slimes_in_order_and_all_have_defaults() -> None:
    assert [field.name for field in fields(Sample)] == SLIMES.split()
    assert Sample().status is Sample.Status.PENDING
    assert Sample(3, 7, prompt="p").index == 7


def test_further_attributes_survive_copies_and_dictionaries() -> None:
    sample = Sample(prompt=[{"role": "user", "content": "hi"}], reward=1.0, status=Sample.Status.TRUNCATED)
    sample.tool_calls = 3  # type: ignore[attr-defined]
    deep = copy.deepcopy(sample)
    deep.metadata["a"] = 1
    assert sample.metadata == {}
    assert deep.tool_calls == 3  # type: ignore[attr-defined]
    found = Sample.from_dict(sample.to_dict())
    assert sample.to_dict()["status"] == "truncated"
    assert vars(found) == vars(sample)
    plain = Sample(prompt="p", index=3)
    assert Sample(**vars(plain).copy()) == plain
    assert pickle.loads(pickle.dumps(sample)) == sample


def test_rewards_by_key() -> None:
    sample = Sample(reward={"score": 0.5})
    assert sample.get_reward_value(SlimeArgs(reward_key="score")) == 0.5
    assert sample.get_reward_value(SlimeArgs(reward_key=None)) == {"score": 0.5}
    assert Sample(reward=2.0).get_reward_value(SlimeArgs()) == 2.0


def test_lengths_in_the_loss() -> None:
    assert Sample(response_length=3).effective_response_length == 3
    assert Sample(response_length=3, loss_mask=[0, 1, 0]).effective_response_length == 1


def test_numbers_are_unique_over_groups() -> None:
    samples = [sample for number in (0, 1, 5) for sample in group_to_slime(group(number, (0.0, 1.0)))]
    assert [(sample.group_index, sample.index) for sample in samples] == [
        (0, 0), (0, 1), (1, 2), (1, 3), (5, 10), (5, 11)
    ]  # fmt: skip


def test_an_answer_has_one_view_with_the_present_reward_and_mask() -> None:
    scored = group(4, (0.0, 1.0), (2, 2))
    before = to_slime(scored.prompt, scored.samples[0].sample, None, (1, 1), group_size=2)
    before.metadata["by_reward"] = True
    masked = replace(scored, samples=(masked_until(scored.samples[0], 1), scored.samples[1]))
    after = group_to_slime(masked)[0]
    assert after is before
    assert (after.reward, after.loss_mask, after.index) == (0.0, [0, 1], 8)
    assert after.metadata == {"by_reward": True}
    assert scored.prompt.metadata == {}


def test_views_of_one_prompt_share_nothing_that_can_change() -> None:
    plain = group(4, (0.0, 1.0))
    metadata = {"info": {"seen": [0]}, "table": object()}
    messages = ({"role": "user", "content": [{"type": "text", "text": "one"}]},)
    scored = replace(plain, prompt=replace(plain.prompt, metadata=metadata, messages=messages))
    first, second = group_to_slime(scored)
    first.metadata["info"]["seen"].append(1)
    first.prompt[0]["content"][0]["text"] = "two"
    assert second.metadata == scored.prompt.metadata == {"info": {"seen": [0]}, "table": metadata["table"]}
    assert second.prompt == [{"role": "user", "content": [{"type": "text", "text": "one"}]}]
    assert messages[0]["content"] == [{"type": "text", "text": "one"}]


def test_views_are_freed_with_their_samples() -> None:
    scored = group(4, (0.0, 1.0))
    group_to_slime(scored)
    keys = {id(each.sample) for each in scored.samples}
    assert keys <= set(_VIEWS)
    del scored
    gc.collect()
    assert not keys & set(_VIEWS)


def resumed(index: int, resumed_at: int) -> OurSample:
    spans = (
        Span(weights=Weights(version=3, step=6), start=0, stop=1),
        Span(weights=Weights(version=4, step=8), start=1, stop=2),
    )
    return OurSample(
        index=index, token_ids=(1, 2), logprobs=array("f", [0.0, 0.0]), spans=spans, text="",
        finish=FinishReason.STOP, seconds=1.0, group_id=GroupId(1), resumed_at=resumed_at,
    )  # fmt: skip


@pytest.mark.parametrize(("resumed_at", "expected"), [(0, {}), (1, {"start_rollout_id": 6})])
def test_resumed_groups_name_the_step_of_their_first_generation(resumed_at: int, expected: dict[str, int]) -> None:
    plain = group(1, (0.0, 1.0), (2, 2))
    samples = tuple(
        replace(scored, sample=resumed(index, resumed_at * index)) for index, scored in enumerate(plain.samples)
    )
    made: ScoredGroup = replace(plain, samples=samples)
    assert [sample.metadata for sample in group_to_slime(made)] == [expected, expected]


def test_a_reward_sees_the_step_as_well() -> None:
    prompt = Prompt(row=0, epoch=0, text="", token_ids=(1,), label=None)
    assert to_slime(prompt, resumed(0, 1), None, (1, 1)).metadata == {"start_rollout_id": 6}


def test_a_sample_of_a_prompt_has_copies_of_what_it_shows() -> None:
    prompt = Prompt(
        row=0,
        epoch=0,
        text="Hi",
        token_ids=(1,),
        label=["a"],
        metadata={"x": [1]},
        messages=({"role": "user", "content": "Hi"},),
        template_variables={"enable_thinking": False},
    )
    sample = sample_of(prompt)
    assert (sample.prompt, sample.label) == ([{"role": "user", "content": "Hi"}], ["a"])
    assert (sample.metadata, sample.apply_chat_template_kwargs) == ({"x": [1]}, {"enable_thinking": False})
    sample.metadata["x"].append(2)
    sample.label.append("b")
    assert (prompt.metadata, prompt.label) == ({"x": [1]}, ["a"])
