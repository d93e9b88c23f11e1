from asyncrl.unhurried import PAUSE_S, WORK_S, unhurried


def test_the_thread_sleeps_after_a_while_of_work() -> None:
    worked, pauses = list[float](), list[float]()
    for _ in unhurried(range(10), lambda: sum(worked), pauses.append):
        worked.append(0.4 * WORK_S)
    assert pauses == [PAUSE_S] * 3, "after each third value"
    assert PAUSE_S > 0.0, "a sleep of nothing does not let another thread run"
