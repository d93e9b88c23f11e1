from asyncrl.page.tabs.charts import Line, averaged, lines, smoothed, thinned


def test_few_points_stay() -> None:
    points = ([0, 1, 2], [1.0, 2.0, 3.0])
    assert thinned(points) == points


def test_many_points_keep_their_extremes() -> None:
    steps = list(range(10_000))
    values = [0.0] * 10_000
    values[1234], values[7777] = 5.0, -5.0
    found, kept = thinned((steps, values), 1000)
    assert len(found) <= 1001
    assert (max(kept), min(kept)) == (5.0, -5.0)
    assert found == sorted(found)


def test_smoothing_is_the_mean_of_the_last_points() -> None:
    assert smoothed(([0, 1, 2, 3], [0.0, 2.0, 4.0, 6.0]), 2)[1] == [0.0, 1.0, 3.0, 5.0]


def test_one_point_is_a_marker_and_a_single_line_needs_no_legend() -> None:
    drawing = lines([Line(label="reward", points=([3], [0.5]))], unit="reward")
    assert drawing["data"][0]["mode"] == "markers"
    assert not drawing["layout"]["showlegend"]


def test_areas_on_each_other_have_the_same_steps() -> None:
    steps = list(range(10_000))
    long, short = (steps, [float(step % 2) for step in steps]), (steps[5_000:], [3.0] * 5_000)
    first, second = averaged([long, short], 1000)
    assert len(first[0]) == 1000
    assert set(second[0]) <= set(first[0])
    assert set(first[1]) == {0.5}
    assert set(second[1]) == {3.0}
    few: list[tuple[list[int], list[float]]] = [([0, 1], [1.0, 2.0]), ([], [])]
    assert averaged(few) == few
