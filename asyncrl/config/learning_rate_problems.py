"""The checks for contradictions between the settings of the learning rate."""

from asyncrl.config.areas import RolloutConfig, TrainConfig
from asyncrl.config.areas.ranges import must
from asyncrl.config.derived import critic_lr, has_critic, lr_decay_iters, lr_warmup_iters


def learning_rate_problems(train: TrainConfig, rollout: RolloutConfig) -> list[str]:
    """One line for each contradiction between warm-up, decay and rates."""
    lines = must(
        train.lr_warmup_fraction is None or train.lr_warmup_iters == 0,
        f"lr-warmup-fraction {train.lr_warmup_fraction} with lr-warmup-iters {train.lr_warmup_iters}; leave one out",
    )
    if train.lr_decay_style == "constant":
        return lines + _without_decay(train)
    return lines + _rates(train) + _warmups(train, rollout)


def _without_decay(train: TrainConfig) -> list[str]:
    given = {
        "lr-decay-iters": train.lr_decay_iters is not None and train.lr_warmup_fraction is None,
        "min-lr": train.min_lr > 0,
    }
    names = ", ".join(name for name, is_given in given.items() if is_given)
    return must(
        not names,
        f"{names} with lr-decay-style constant, which has no decay; give cosine or linear, or leave out {names}",
    )


def _rates(train: TrainConfig) -> list[str]:
    rates = {"lr": train.lr}
    if has_critic(train) and train.critic_lr is not None:
        rates["critic-lr"] = critic_lr(train)
    return [
        f"min-lr {train.min_lr:g} must be at most {name} {rate:g}"
        for name, rate in rates.items()
        if train.min_lr > rate
    ]


def _warmups(train: TrainConfig, rollout: RolloutConfig) -> list[str]:
    end = lr_decay_iters(train, rollout)
    default = "" if train.lr_decay_iters else " (from num-rollout)"
    first, warmup = train.num_critic_only_steps, lr_warmup_iters(train, end)
    after = f"num-critic-only-steps {first} + " if first else ""
    warmups = {f"{after}lr-warmup-iters {warmup}": first + warmup}
    if has_critic(train):
        warmups[f"critic-lr-warmup-iters {train.critic_lr_warmup_iters}"] = train.critic_lr_warmup_iters
    return [
        f"lr-decay-iters {end}{default} must be above {name}: the decay starts after the warm-up"
        for name, warmup_end in warmups.items()
        if end <= warmup_end
    ]
