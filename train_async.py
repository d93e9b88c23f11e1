"""Train a language model with asynchronous reinforcement learning.

    uv run train_async.py --config configs/quickstart.toml [--any-flag value ...]

The configuration is read and checked first; then everything starts: Ray, SGLang and its router, Megatron.  SGLang
generates while Megatron trains, until the last step.  ``--help`` lists every flag.
"""

import sys

if __name__ == "__main__":  # the reward's worker processes import this file again, and nothing of asyncrl with it
    from asyncrl.app.ending.leaving import leave
    from asyncrl.app.entry import main

    leave(main(sys.argv[1:]))
