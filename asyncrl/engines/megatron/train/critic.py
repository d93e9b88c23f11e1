"""The critic of PPO: a model that predicts, before each token of an answer, the reward still to come."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from asyncrl.config.derived import critic_load
from asyncrl.engines.megatron.model.build import build_model
from asyncrl.engines.megatron.model.packing import Floats
from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.engines.megatron.train.forward_step import value_loss_step, value_step
from asyncrl.engines.megatron.train.learner import Gradients, Learner
from asyncrl.engines.megatron.train.learning_rates import critic_schedule
from asyncrl.engines.megatron.train.objective import ValueObjective
from asyncrl.engines.megatron.train.optimizer_updates import Update
from asyncrl.engines.megatron.weights.hf_weights import load_hf
from asyncrl.models.shape import ModelShape, read_shape


class Critic:
    """A second model on every rank.  Its values are 0 everywhere until its first update."""

    def __init__(self, settings: TrainerSettings, shape: ModelShape, device: torch.device) -> None:
        """Load the weights of ``--critic-load``, a model of ``shape``."""
        self._train = settings.train
        self._schedule = critic_schedule(settings)
        self._device = device
        self.learner = Learner(_model(settings, shape, device), settings, name="critic")

    def set_rate(self, step: int) -> None:
        """Set the learning rate of training step ``step``, counted from 0."""
        self.learner.set_rate(self._schedule.rate(step))

    def values(self, updates: list[Update]) -> dict[int, Floats]:
        """Compute the value before each response token of this rank's share of the samples, by index in the batch."""
        return self.learner.rows(updates, value_step(self.learner.model.value_head, self._device))

    def differentiate(self, update: Update) -> Gradients:
        """See ``Learner.differentiate``."""
        objective = ValueObjective(
            train=self._train, count=update.count(per_token=self._train.calculate_per_token_loss)
        )
        step = value_loss_step(objective, self.learner.model.value_head, self._device)
        return self.learner.differentiate(update, step)


def critic_shape(settings: TrainerSettings, policy: ModelShape) -> ModelShape:
    """Return the critic's shape: the policy's, shape flags included, where both start from the same folder."""
    path = critic_load(settings.train, settings.model)
    return policy if path == settings.model.hf_checkpoint else read_shape(path)


def _model(settings: TrainerSettings, shape: ModelShape, device: torch.device) -> Any:
    """Build a model with one number per position in place of a distribution over the vocabulary.

    It has no output layer, and so no tied embeddings.
    """
    path, dtype = critic_load(settings.train, settings.model), getattr(torch, settings.dtype)
    shape = replace(shape, ties_embeddings=False)
    model = build_model(shape, device, dtype, settings.parallel, settings.model.transformer_impl)
    if model.post_process:
        model.output_layer = None
    load_hf(model, shape, path)
    model.value_head = None
    if model.post_process:
        model.value_head = nn.Linear(model.config.hidden_size, 1, device=device, dtype=dtype)
        nn.init.zeros_(model.value_head.weight)
        nn.init.zeros_(model.value_head.bias)
    return model
