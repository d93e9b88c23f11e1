"""The settings of rewards, and what contradicts them."""

from dataclasses import replace
from typing import Any

import pytest

from asyncrl.config.areas import RewardConfig, RunConfig
from asyncrl.config.areas.rewards import RM_TYPES
from asyncrl.config.problems import contradictions
from asyncrl.errors import ConfigError
from tests.unit.config.runs import load


@pytest.mark.parametrize("name", [*RM_TYPES, "boxed_math", "boxed_f1"])
def test_every_name_is_accepted(name: str) -> None:
    assert RewardConfig(rm_type=name).rm_type == name


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"rm_type": "deepscalar"}, 'got "deepscalar"; did you mean deepscaler?'),
        ({"rm_type": "remote-rm"}, 'got "remote-rm"; did you mean remote_rm?'),
        ({"rm_type": "boxed_mth"}, 'got "boxed_mth"; did you mean math?'),
        ({"rm_type": "xyz"}, "rm-type must be one of number, exact, math, deepscaler, dapo, f1, gpqa, ifeval, random"),
        ({"rm_type": "xyz"}, 'got "xyz"; give any other reward as a function with --custom-rm-path'),
        ({"rm_type": "ifbench"}, 'rm-type "ifbench": its constraints are not built in; give ifeval'),
        ({"rm_url": "rewards:80"}, "rm-url must start with http:// or https://, got 'rewards:80'"),
        ({"reward_num_workers": 0}, "reward-num-workers must be at least 1, got 0"),
        ({"rm_concurrency": 0}, "rm-concurrency must be at least 1, got 0"),
        ({"reward_worker_memory_gb": 0.0}, "reward-worker-memory-gb must be above 0, got 0.0"),
    ],
)
def test_a_wrong_value_is_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        RewardConfig(**given)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def problems(run: RunConfig, **reward: Any) -> list[str]:
    return contradictions(replace(run, reward=RewardConfig(**reward)))


@pytest.fixture
def run(tmp_path: Any) -> RunConfig:
    return load(tmp_path)


def test_contradictions(run: RunConfig) -> None:
    assert problems(run, rm_type="math") == []
    assert problems(run, rm_type="remote_rm") == ["rm-type remote_rm without rm-url; give the URL of the service"]
    assert problems(run, rm_type="remote_rm", rm_url="http://a") == []
    assert problems(run, rm_type="math", group_rm=True) == [
        "group-rm without custom-rm-path: built-in rewards see one response; leave out group-rm"
    ]
    for key, lines in (("acc", []), ("pred", ["reward-key pred with dapo, which has score and acc; give one of them"])):
        assert problems(run, rm_type="dapo", reward_key=key) == lines
    assert problems(run, custom_rm_path="my.py:f", rm_type="dapo", reward_key="pred") == []
    without_metadata = replace(run, data=replace(run.data, metadata_key=None))
    assert problems(without_metadata, rm_type="ifeval") == [
        "rm-type ifeval without metadata-key: the instructions are in the metadata; give metadata-key"
    ]
    evaluated = replace(run, evaluation=replace(run.evaluation, eval_interval=1, eval_prompt_data=("a", "b")))
    assert problems(evaluated, rm_type="math") == []
    assert problems(evaluated, custom_rm_path="a:b", group_rm=True) == [
        "group-rm with eval-interval: evaluation grades each response alone; leave out eval-interval"
    ]


def test_rows_may_bring_their_types(run: RunConfig) -> None:
    own = replace(run, data=replace(run.data, metadata_key="metadata", label_key=None))
    assert problems(own) == []
    assert problems(own, rm_type="boxed_math") == [
        "rm-type boxed_math without label-key: the reward compares with a label; give label-key"
    ]
