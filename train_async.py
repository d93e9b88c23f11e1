"""Train a language model with asynchronous reinforcement learning.

    uv run train_async.py --config configs/quickstart.toml [--any-flag value ...]

The configuration is read and checked first; then everything starts: Ray, SGLang and its router, Megatron.  SGLang
generates while Megatron trains, until the last step.  ``--help`` lists every flag.
"""

import sys

from asyncrl.app.entry import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
