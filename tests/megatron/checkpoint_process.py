"""One rank that writes checkpoints.

    checkpoint_process.py CHECKPOINT ROOT RANK WORLD_SIZE PORT whole|killed

``whole`` writes one after two steps and trains a third; ``killed`` writes one after a step, and dies of the next one.
"""

import resource
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from asyncrl.engines.megatron.rank import MegatronRank

from tiny import random_batch, trainer_settings

from asyncrl.engines.checkpoints import folder_of
from asyncrl.types import TrainReport


def run(model: Path, root: Path, rank: int, world_size: int, port: int, how: str) -> TrainReport:
    """The report of the step after the checkpoint."""
    trainer = MegatronRank(trainer_settings(model, timeout_s=120.0), rank, world_size, "127.0.0.1", port)
    trainer.train(random_batch(seed=0, step=0))
    if how == "killed":
        _die(trainer, root)
    trainer.train(random_batch(seed=1, step=1))
    trainer.begin_checkpoint(folder_of(root, 2), {}, True)
    report = trainer.train(random_batch(seed=2, step=2))
    trainer.finish_checkpoint()
    trainer.save(root / "two")
    trainer.close()
    return report


def _die(trainer: MegatronRank, root: Path) -> None:
    trainer.begin_checkpoint(folder_of(root, 1), {}, True)
    trainer.finish_checkpoint()
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    with file_size_limit():
        trainer.begin_checkpoint(folder_of(root, 2), {}, True)
        trainer.finish_checkpoint()


@contextmanager
def file_size_limit() -> Iterator[None]:
    """Nobody in this process can write more than this to a file: less than a tiny model, more than its description."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, root, rank, world_size, port, how = sys.argv[1:]
    run(Path(model), Path(root), int(rank), int(world_size), int(port), how)
