import pytest

from asyncrl.metrics.words import duration, percent, short_s, sparkline, who_waits


@pytest.mark.parametrize(
    ("waited", "idle", "words"),
    [
        (0.63, 0.0, "rollout-bound: the trainer waited 63 %"),
        (0.02, 0.4, "trainer-bound: the engines were idle 40 %"),
        (0.55, 0.42, "taking turns: trainer waited 55 %, engines 42 %"),
        (0.03, 0.0, "overlapped: trainer waited 3 %, engines 0 %"),
    ],
)
def test_the_slower_side_is_named_in_words(waited: float, idle: float, words: str) -> None:
    assert who_waits(waited, idle) == words


def test_a_small_share_is_not_shown_as_zero_nor_a_large_one_as_all() -> None:
    assert [percent(share) for share in (0.0, 0.001, 0.5, 0.9999, 1.0)] == ["0 %", "<1 %", "50 %", ">99 %", "100 %"]


def test_a_sparkline_spans_its_values_and_draws_equal_ones_in_the_middle() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.5, 0.5]) == "▄▄"
    assert sparkline([float("nan"), 1.0]) == "▄"
    assert sparkline([]) == ""


def test_times_are_short() -> None:
    assert [duration(seconds) for seconds in (0, 59.6, 588, 3723)] == ["0:00", "1:00", "9:48", "1:02:03"]
    assert [short_s(seconds) for seconds in (0.0123, 0.31, 7.1, 130)] == ["0.012 s", "0.31 s", "7.1 s", "130 s"]
