"""The learning-rate schedules of policy and critic."""

from asyncrl.algorithms.learning_rate import LearningRateSchedule
from asyncrl.config.derived import critic_lr, lr_warmup_iters
from asyncrl.engines.megatron.setup.settings import TrainerSettings


def policy_schedule(settings: TrainerSettings) -> LearningRateSchedule:
    """Return the schedule of the policy's learning rate, which begins when the policy is first trained."""
    train, decay_iters = settings.train, settings.lr_decay_iters
    return LearningRateSchedule(
        lr=train.lr,
        style=train.lr_decay_style,
        min_lr=train.min_lr,
        warmup_iters=lr_warmup_iters(train, decay_iters),
        decay_iters=decay_iters,
        first_step=train.num_critic_only_steps,
    )


def critic_schedule(settings: TrainerSettings) -> LearningRateSchedule:
    """Return the schedule of the critic's learning rate, with a separate rate and warm-up."""
    train = settings.train
    return LearningRateSchedule(
        lr=critic_lr(train),
        style=train.lr_decay_style,
        min_lr=train.min_lr,
        warmup_iters=train.critic_lr_warmup_iters,
        decay_iters=settings.lr_decay_iters,
    )
