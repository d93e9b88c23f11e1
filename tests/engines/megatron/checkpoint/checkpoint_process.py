"""A trainer that writes a checkpoint after its first step, and dies while it writes the second one.

python -m tests.engines.megatron.checkpoint.checkpoint_process CHECKPOINT ROOT
"""

import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.megatron_imports import megatron_imports

with megatron_imports():
    from tests.engines.megatron.tiny import one_rank, random_batch, trainer_settings

from tests.save_targets import target as target_of


def die(model: Path, root: Path) -> None:
    """The kernel kills this process within the first large file of the second checkpoint."""
    with one_rank(trainer_settings(model)) as trainer:
        trainer.train(random_batch())
        trainer.begin_checkpoint(target_of(root, 1), {}, True)
        trainer.finish_checkpoint()
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        with file_size_limit():
            trainer.begin_checkpoint(target_of(root, 2), {}, True)
            trainer.finish_checkpoint()


@contextmanager
def file_size_limit() -> Iterator[None]:
    """Limit every file that this process writes to less than a tiny model, and more than its description."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


if __name__ == "__main__":
    torch.set_num_threads(1)
    die(*map(Path, sys.argv[1:]))
