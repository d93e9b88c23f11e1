"""Episodes in the pipeline: turns, tools, interruptions, cancellations and limits."""

from tests.unit.pipeline.episodes import ToolUser
from tests.unit.pipeline.harness import World


def test_an_episode_is_trained_turn_by_turn() -> None:
    world = World(episode=ToolUser(turns=3)).run()
    scored = world.trainer.batches[0].groups[0].samples[0]
    assert [(turn.start, turn.stop) for turn in scored.sample.turns] == [(0, 8), (10, 18), (20, 28)]
    assert scored.loss_mask == (1,) * 8 + (0,) * 2 + (1,) * 8 + (0,) * 2 + (1,) * 8
    tokens = world.facts[-1].scheduler.tokens
    assert tokens.trained == 4 * 8 * 24
    assert tokens.observed == 4 * 8 * 4
    assert world.all_slots.in_use == 0
