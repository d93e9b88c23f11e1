"""Accounts that do not balance raise an error."""

import pytest

from asyncrl.metrics.facts import GroupCounts, TokenCounts
from asyncrl.pipeline.scheduling.ledger import GroupOutcome, Ledger, check_balance
from asyncrl.types import GroupId


def test_a_lost_token_is_noticed() -> None:
    with pytest.raises(AssertionError, match="10 tokens generated, 9 accounted for"):
        check_balance(TokenCounts(generated=10, trained=5, held=4), GroupCounts())


def test_a_lost_group_is_noticed() -> None:
    with pytest.raises(AssertionError, match="2 groups admitted"):
        check_balance(TokenCounts(), GroupCounts(admitted=2, trained=1))


def test_a_group_can_not_be_admitted_twice() -> None:
    ledger = Ledger()
    ledger.admit(GroupId(0))
    with pytest.raises(AssertionError, match="admitted twice"):
        ledger.admit(GroupId(0))


def test_a_group_can_not_skip_a_state() -> None:
    ledger = Ledger()
    ledger.admit(GroupId(0))
    with pytest.raises(AssertionError, match="expected"):
        ledger.take(GroupId(0))


def test_a_group_can_not_leave_twice() -> None:
    ledger = Ledger()
    ledger.admit(GroupId(0))
    ledger.drop(GroupId(0), GroupOutcome.FAILED, 3)
    with pytest.raises(AssertionError, match="not outstanding"):
        ledger.drop(GroupId(0), GroupOutcome.FILTERED, 3)
