"""Losses and advantages do not depend on how samples are packed, ordered or spread over ranks."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.areas import TrainConfig
from asyncrl.engines.megatron.model.packing import Example, Microbatch, Packing, microbatches
from asyncrl.engines.megatron.train.objective import Objective
from asyncrl.engines.megatron.train.sample_advantages import with_advantages

TRAIN = st.builds(
    TrainConfig,
    advantage_estimator=st.sampled_from(
        ["grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
    ),
    eps_clip_c=st.sampled_from([None, 1.5]),
    kl_coef=st.sampled_from([0.0, 0.1]),
    use_kl_loss=st.booleans(),
    kl_loss_coef=st.just(0.3),
    kl_loss_type=st.sampled_from(["k1", "k2", "k3", "low_var_kl"]),
    use_unbiased_kl=st.booleans(),
    entropy_coef=st.sampled_from([0.0, 0.1]),
    use_tis=st.booleans(),
    tis_mode=st.sampled_from(["truncate", "mask", "whole"]),
    tis_level=st.sampled_from(["token", "sequence", "geometric"]),
    tis_clip=st.just(1.2),
    tis_clip_low=st.just(0.8),
    use_opsm=st.booleans(),
    calculate_per_token_loss=st.booleans(),
)


def drawn_examples(rng: random.Random, count: int) -> list[Example]:
    """Samples with every input that a loss may use; some have no token in the loss, some share a rollout."""

    def example(index: int) -> Example:
        length = rng.randint(1, 9)

        def near(center: float) -> list[float]:
            return [center + rng.uniform(-0.4, 0.4) for _ in range(length)]

        return Example(
            index=index,
            token_ids=tuple(range(length + rng.randint(1, 4))),
            num_response=length,
            loss_mask=tuple(int(rng.random() < 0.8) for _ in range(length)),
            behaviour_logprobs=tuple(math.nan if rng.random() < 0.1 else logprob for logprob in near(-2.0)),
            turns=((0, length // 2), (length // 2, length)),
            proximal_logprobs=np.array(near(-2.0), np.float32),
            ref_logprobs=np.array(near(-2.0), np.float32),
        )

    examples = [example(index) for index in range(count)]
    rollouts = [rng.randrange(count) for _ in examples]
    trained = Counter[int]()
    for each, rollout in zip(examples, rollouts, strict=True):
        trained[rollout] += each.num_trained
    return [replace(each, rollout_tokens=trained[rollout]) for each, rollout in zip(examples, rollouts, strict=True)]


def evaluated(
    train: TrainConfig, rows: Sequence[Microbatch], present: dict[int, np.ndarray], count: int
) -> tuple[float, dict[str, float], dict[int, list[float]]]:
    """The loss, the reported means, and the gradient at each log-prob; entropies are made from log-probs."""
    objective = Objective(train=train, temperature=1.0, against_rollout=not train.use_tis, count=count)
    losses, sums, gradients = 0.0, dict[str, float](), dict[int, list[float]]()
    for row in rows:
        flat = np.concatenate([np.zeros(0, np.float32), *(present[index] for index in row.indices)])
        logprobs = torch.tensor(flat, requires_grad=True)
        loss, told = objective.loss(row, logprobs, -0.5 * logprobs)
        loss.backward()  # type: ignore[no-untyped-call]  # torch is untyped
        assert logprobs.grad is not None
        parts = np.split(logprobs.grad.numpy(), np.cumsum(row.lengths)[:-1]) if row.lengths else []
        gradients |= {index: part.tolist() for index, part in zip(row.indices, parts, strict=True)}
        losses += loss.item()
        sums = {name: sums.get(name, 0.0) + value.item() for name, value in told.items()}
    return losses, sums, gradients


@settings(max_examples=60, deadline=None)
@given(train=TRAIN, seed=st.integers(0, 2**31), count=st.integers(1, 12), ranks=st.integers(1, 3))
def test_the_loss_does_not_depend_on_packing_order_or_ranks(
    train: TrainConfig, seed: int, count: int, ranks: int
) -> None:
    rng = random.Random(seed)
    examples = drawn_examples(rng, count)
    outcomes = torch.tensor([rng.uniform(-1, 1) for _ in examples], dtype=torch.float64)
    present = {e.index: np.array([rng.uniform(-2.5, -1.5) for _ in e.loss_mask], np.float32) for e in examples}
    shuffled = rng.sample(examples, count)
    turns = {(e.index, place): rng.uniform(-1, 1) for e in examples for place in (0, 1) if rng.random() < 0.5}
    one, told = with_advantages(examples, outcomes, train, lambda numbers: numbers, turn_outcomes=turns)
    other, told_again = with_advantages(shuffled, outcomes, train, lambda numbers: numbers, turn_outcomes=turns)
    advantages = {e.index: e.advantages for e in one}
    for example in other:
        expected = advantages[example.index]
        assert example.advantages is not None and expected is not None
        np.testing.assert_allclose(example.advantages, expected, atol=1e-6)
    np.testing.assert_allclose(list(told_again.values()), list(told.values()), rtol=1e-12)

    together = evaluated(train, microbatches(one, 0, 1, Packing(max_tokens=1000)), present, count)
    packing = Packing(max_tokens=rng.randint(1, 30), num_samples=rng.choice([None, 3]), is_balanced=rng.random() < 0.5)
    rows = [row for rank in range(ranks) for row in microbatches(other, rank, ranks, packing)]
    apart = evaluated(train, rows, present, count)
    np.testing.assert_allclose(apart[0], together[0], atol=1e-6)
    assert apart[1].keys() == together[1].keys()
    np.testing.assert_allclose(list(apart[1].values()), [together[1][name] for name in apart[1]], atol=1e-4, rtol=1e-5)
    for index, gradient in together[2].items():
        np.testing.assert_allclose(apart[2][index], gradient, atol=1e-6)


def test_numbers_of_masked_tokens_change_nothing() -> None:
    rng = random.Random(0)
    example = replace(drawn_examples(rng, 1)[0], token_ids=(1, 2, 3, 4), num_response=3, loss_mask=(1, 0, 1))

    def loss(stray: float) -> list[float]:
        row = np.array([-1.0, stray, -2.0], np.float32)
        odd = replace(
            example,
            behaviour_logprobs=tuple(row.tolist()),
            proximal_logprobs=row - 0.25,
            ref_logprobs=row + 0.5,
            advantages=np.array([1.0, stray, -1.0], np.float32),
        )
        train = TrainConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", use_tis=True, use_opsm=True)
        present = {0: np.array([-1.1, -1.0, -1.9], np.float32)}
        losses, _, gradients = evaluated(train, microbatches([odd], 0, 1, Packing(max_tokens=10)), present, 1)
        return [losses, *gradients[0]]

    assert loss(float("nan")) == loss(-3.0)
