"""The simulated trainer at its death."""

import asyncio

import pytest

from asyncrl.errors import TrainerFailed
from asyncrl.sim.faults.world.collective import Collectives
from asyncrl.sim.faults.world.mortal import MortalTrainer
from asyncrl.sim.faults.world.plan import Weather, drawn
from asyncrl.sim.faults.world.trainer import SimTrainer
from asyncrl.sim.faults.world.witness import Witness
from tests.virtual_time import run_virtually


def test_a_trainer_that_dies_while_it_opens_a_group_serves_no_store() -> None:
    async def main() -> bool:
        setting, weather = drawn(0)[0], Weather(1, lambda: 0.0, lambda line: None)
        collectives, witness = Collectives(weather, lambda number: ""), Witness(setting, None, lambda line: None)
        trainer = MortalTrainer(lambda step: SimTrainer(setting, weather, collectives, witness, step), 0, weather)
        asyncio.get_running_loop().call_later(0.001, trainer.die)  # when the group would be opened
        with pytest.raises(TrainerFailed):
            await trainer.open_group(master_address="10.0.1.1", master_port=29500, group_name="weights-0")
        return collectives.is_served("weights-0")

    assert run_virtually(main())[0] is False
