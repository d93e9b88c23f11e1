"""Two agents in one episode, each with its own conversation and its own reward.

    proposer    answers, and answers again after the critic's remark       reward: the second answer is right
    critic      sees the question and the first answer, says right or wrong      reward: the remark is true

Both are the same model, and both are trained: an episode gives two samples.
"""

from asyncrl.rollouts.native import Episode, ModelTurn

END = "<end>"
"""The end of a turn of the quickstart's model, where its text has it."""


async def episode(ep: Episode) -> None:
    """Play both agents; they alternate."""
    question = ep.metadata["question"]
    ep.reward = 0.0
    first = answer_of(await ep.generate())

    critic = ep.conversation([{"role": "user", "content": f"{question}={first}"}])
    critic.reward = 0.0
    remark = answer_of(await critic.generate())
    is_right = first == ep.label
    critic.reward = float(remark == ("right" if is_right else "wrong"))

    ep.observe({"role": "user", "content": remark})
    second = answer_of(await ep.generate())
    ep.reward = float(second == ep.label)
    ep.metadata.update(first_is_right=is_right, second_is_right=second == ep.label, changed=first != second)


def answer_of(turn: ModelTurn) -> str:
    """Return the text of a turn without its end."""
    return turn.text.removesuffix(END).strip()
