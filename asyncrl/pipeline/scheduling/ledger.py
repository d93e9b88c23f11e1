"""The ledger: the account of every admitted group and every generated token.

    admitted = trained + filtered + stale + failed + outstanding          by group
    generated = trained + masked + filtered + stale + failed + held       by token

Each transition is one entry.  The scheduler counts held tokens from its own data, never from the other columns, so that
``check_balance`` can find an error.
"""

import enum
from collections import Counter
from dataclasses import asdict

from asyncrl.metrics.facts import GroupCounts, TokenCounts
from asyncrl.types import GroupId, ScoredGroup


class State(enum.Enum):
    """The state of an outstanding group: admitted, and neither trained nor dropped yet."""

    IN_FLIGHT = "in_flight"
    PARTIAL = "partial"
    BUFFERED = "buffered"
    TRAINING = "training"


class GroupOutcome(enum.Enum):
    """The ways in which a group leaves without being trained."""

    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"


class Ledger:
    """The state of each outstanding group by id, and counts of groups and tokens."""

    def __init__(self, tokens: TokenCounts | None = None, groups: GroupCounts | None = None) -> None:
        """Continue the accounts ``tokens`` and ``groups`` of the resumed run, in which nothing is held.

        With a journal, ``generated`` and ``admitted`` count the groups that ``restore`` adds, and no other column does.
        """
        self._states: dict[GroupId, State] = {}
        self._groups: Counter[str] = Counter(asdict(groups) if groups else {})
        self._tokens: Counter[str] = Counter(asdict(tokens) if tokens else {})
        self._tokens.pop("held", None)

    def admit(self, group_id: GroupId) -> None:
        """Record an admitted group."""
        if group_id in self._states:
            raise AssertionError(f"group {group_id} was admitted twice")
        self._states[group_id] = State.IN_FLIGHT
        self._groups["admitted"] += 1

    def restore(self, group_id: GroupId, state: State) -> None:
        """Record a group of the resumed run, whose admission is counted already."""
        if group_id in self._states:
            raise AssertionError(f"group {group_id} was restored twice")
        self._states[group_id] = state

    def leave_out(self) -> None:
        """Record a prompt that was taken and starts no group."""
        self._groups["quarantined"] += 1

    def generate(self, num_tokens: int) -> None:
        """Count tokens that an engine delivered for an admitted group."""
        self._tokens["generated"] += num_tokens

    def waste(self, num_tokens: int) -> None:
        """Count tokens that no group has, as stale.

        An engine delivered them after their group was interrupted or dropped, or for an answer that began anew.
        """
        self._tokens["generated"] += num_tokens
        self._tokens[GroupOutcome.STALE.value] += num_tokens

    def interrupt(self, group_id: GroupId) -> None:
        """Record an interrupted group, which keeps its tokens."""
        self._move(group_id, State.IN_FLIGHT, State.PARTIAL)

    def resume(self, group_id: GroupId) -> None:
        """Record a resumed group."""
        self._move(group_id, State.PARTIAL, State.IN_FLIGHT)

    def buffer(self, group_id: GroupId) -> None:
        """Record a group that was scored and kept."""
        self._move(group_id, State.IN_FLIGHT, State.BUFFERED)

    def take(self, group_id: GroupId) -> None:
        """Record a group in the batch that the trainer took."""
        self._move(group_id, State.BUFFERED, State.TRAINING)

    def train(self, group: ScoredGroup) -> None:
        """Record a trained group."""
        self._expect(group.group_id, State.TRAINING)
        del self._states[group.group_id]
        in_loss = sum(sum(scored.loss_mask) for scored in group.samples)
        # A user's trajectories may hold a token twice, or tokens that no engine generated.
        trained = in_loss if group.num_generated is None else min(group.num_trained, group.num_tokens)
        self._groups["trained"] += 1
        self._tokens["trained"] += trained
        self._tokens["masked"] += group.num_tokens - trained
        if group.num_generated is not None:
            self._tokens["trained_copies"] += in_loss - trained
            self._tokens["observed"] += group.num_observed

    def drop(self, group_id: GroupId, outcome: GroupOutcome, num_tokens: int) -> None:
        """Record a group that left untrained with ``num_tokens`` generated tokens."""
        if self._states.pop(group_id, None) is None:
            raise AssertionError(f"group {group_id} is {outcome.value} but was not outstanding")
        self._groups[outcome.value] += 1
        self._tokens[outcome.value] += num_tokens

    def observe(self, num_tokens: int) -> None:
        """Count tokens of observations in a group that will not be trained."""
        self._tokens["observed"] += num_tokens

    @property
    def num_generated(self) -> int:
        """Tokens that engines have delivered."""
        return self._tokens["generated"]

    def groups(self) -> GroupCounts:
        """Return the group account."""
        states = Counter(state.value for state in self._states.values())
        return GroupCounts(**{**self._groups, **states})

    def tokens(self, held: int) -> TokenCounts:
        """Return the token account; ``held`` is the number of tokens held now."""
        return TokenCounts(**self._tokens, held=held)

    def _move(self, group_id: GroupId, old: State, new: State) -> None:
        self._expect(group_id, old)
        self._states[group_id] = new

    def _expect(self, group_id: GroupId, state: State) -> None:
        if self._states.get(group_id) is not state:
            raise AssertionError(f"group {group_id} is {self._states.get(group_id)}, expected {state}")


def check_balance(tokens: TokenCounts, groups: GroupCounts) -> None:
    """Raise AssertionError if an account does not balance, which means a loss or a double count."""
    spent = tokens.trained + tokens.masked + tokens.filtered + tokens.stale + tokens.failed + tokens.held
    if tokens.generated != spent:
        raise AssertionError(f"{tokens.generated} tokens generated, {spent} accounted for: {tokens}")
    closed = groups.trained + groups.filtered + groups.stale + groups.failed
    if groups.admitted != closed + groups.in_flight + groups.partial + groups.buffered + groups.training:
        raise AssertionError(f"{groups.admitted} groups admitted, but the account says {groups}")
