"""Train a language model with synchronous reinforcement learning: ``train_async.py`` with ``--max-staleness 0``.

    uv run train.py --config configs/quickstart.toml [--any-flag value ...]

Generation and training alternate, so every token is trained under the weights that generated it.  ``--help`` lists
every flag.
"""

import sys

if __name__ == "__main__":  # the reward's worker processes import this file again, and nothing of asyncrl with it
    from asyncrl.app.ending.leaving import leave
    from asyncrl.app.entry import main

    leave(main(sys.argv[1:], program="train.py"))
