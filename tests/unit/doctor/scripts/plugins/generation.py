"""A multi-turn function, which imports another file."""

import calls

raise AssertionError("the doctor runs nothing")


async def generate(args, sample, sampling_params):
    return await calls.answer(sample)
