"""The same agent from an episode: in a thread of the process of user code, without a new process per episode."""

import importlib
import sys
from pathlib import Path

from openai import OpenAI

from asyncrl.rollouts.native import Episode

sys.path.insert(0, str(Path(__file__).parent))
solve = importlib.import_module("agent").solve


async def episode(ep: Episode) -> None:
    """Run the agent with this episode's address and key; compare its answer."""
    client = OpenAI(base_url=ep.openai_base_url, api_key=ep.api_key, max_retries=0)
    ep.reward = 0.0
    answer = await ep.call(solve, ep.metadata["question"], client)
    ep.reward = float(answer.strip() == ep.label)
