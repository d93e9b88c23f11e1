"""A large file is streamed in the memory of a small one."""

import pytest

from benchmarks.data import __main__ as benchmark
from benchmarks.data.measure import Measurement


@pytest.mark.timeout(900)
def test_a_larger_file_takes_no_more_memory(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("data")
    found: dict[int, Measurement] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "table", found.update)
        words = ["--megabytes", "2", "60", "--prompts", "1000", "--shuffle", "--folder", str(folder)]
        assert benchmark.main(words) == 0
    small, large = found.values()
    assert abs(large.most_mb - small.most_mb) < 20.0  # the file has 58 MB more
    assert not list(folder.iterdir())


def test_figures_outside_of_the_limits_are_named() -> None:
    good = Measurement(open_s=0.1, start_s=0.5, first_batch_s=0.5, first_mb=60.0, most_mb=60.0, prompts_per_s=1.0)
    bad = Measurement(open_s=0.1, start_s=0.5, first_batch_s=2.5, first_mb=60.0, most_mb=261.0, prompts_per_s=1.0)
    assert benchmark.problems({2: good, 2000: good}) == []
    assert benchmark.problems({2: good, 2000: bad}) == [
        "2000 MB: the first batch took 2.50 s, more than 2",
        "2000 MB: 201 MB more memory, more than 200",
    ]
