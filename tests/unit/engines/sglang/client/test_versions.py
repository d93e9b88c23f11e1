"""The version of an engine is certain a moment after it was first seen."""

from asyncrl.engines.sglang.client.versions import DETOKENIZER_LAG_S, VersionTrail


def test_a_version_is_certain_once_it_has_been_seen_for_a_while() -> None:
    trail = VersionTrail()
    assert trail.oldest_possible(4, 0.0) == 4
    assert trail.oldest_possible(5, 10.0) == 4
    assert trail.oldest_possible(5, 10.0 + DETOKENIZER_LAG_S / 2) == 4
    assert trail.oldest_possible(4, 10.0 + DETOKENIZER_LAG_S / 2) == 4
    assert trail.oldest_possible(5, 10.0 + DETOKENIZER_LAG_S) == 5
    assert trail.oldest_possible(4, 10.0 + DETOKENIZER_LAG_S) == 4


def test_versions_in_quick_succession_become_certain_one_after_the_other() -> None:
    trail = VersionTrail()
    for version in range(4):
        trail.oldest_possible(version, 10.0 + version * DETOKENIZER_LAG_S / 2)
    assert trail.oldest_possible(3, 10.0 + 2 * DETOKENIZER_LAG_S) == 2
    assert trail.oldest_possible(3, 10.0 + 3 * DETOKENIZER_LAG_S) == 3
