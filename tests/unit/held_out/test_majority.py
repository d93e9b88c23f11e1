import pytest

from asyncrl.held_out.majority import majority


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([("7", True), ("7", True), ("8", False)], 1.0),
        ([("7", True), ("8", False), ("8", False)], 0.0),
        ([("7", True), ("8", False)], 0.5),
        ([("7", True), ("8", False), ("9", False), (None, False)], 1 / 3),
        ([("7", True), (None, False), (None, False)], 1.0),
        ([(None, True), (None, False)], 0.0),
        ([("a", True), ("a", False), ("b", False)], 0.5),
        ([], 0.0),
    ],
)
def test_the_most_frequent_final_answer_decides(votes: list[tuple[str | None, bool]], expected: float) -> None:
    assert majority(votes) == pytest.approx(expected)
    assert majority(votes[::-1]) == pytest.approx(expected)
