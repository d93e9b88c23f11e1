"""Train a language model with synchronous reinforcement learning: ``train_async.py`` with ``--max-staleness 0``.

    uv run train.py --config configs/quickstart.toml [--any-flag value ...]

Generation and training alternate, so every token is trained under the weights that generated it.  ``--help`` lists
every flag.
"""

import sys

from asyncrl.app.entry import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="train.py"))
