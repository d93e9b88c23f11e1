"""The HTTP calls of ``generation``."""

import slime.utils.misc
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def answer(sample: Sample):
    return await post(slime.utils.misc.url, {})
