import pytest

from asyncrl.filters import check_reward_nonzero_std
from asyncrl.types import FinishReason, GroupId, Prompt, Sample, ScoredGroup, ScoredSample, Weights


def group(*rewards: float) -> ScoredGroup:
    samples = [
        Sample(index=index, token_ids=(), logprobs=(), spans=(), text="", finish=FinishReason.STOP, seconds=0.0)
        for index in range(len(rewards))
    ]
    return ScoredGroup(
        group_id=GroupId(0),
        prompt=Prompt(row=0, epoch=0, text="", token_ids=(1,), label=None),
        dispatched=Weights(version=0, step=0),
        samples=tuple(
            ScoredSample(sample=sample, reward=reward, loss_mask=())
            for sample, reward in zip(samples, rewards, strict=True)
        ),
    )


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((1.0, 0.0), None), ((1.0, 1.0), "zero_std_1.0"), ((0.1, 0.1 + 1e-9), "zero_std_0.1"), ((-1.0,), "zero_std_-1.0")],
)
def test_groups_whose_rewards_are_equal_are_dropped(rewards: tuple[float, ...], reason: str | None) -> None:
    assert check_reward_nonzero_std(group(*rewards)) == reason
