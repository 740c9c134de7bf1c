"""The commit protocol in all interleavings of small scripts, in a model; each wrong variant of it is found."""

import pytest

from tests.faults.crash.model.check import SCRIPTS, VARIANTS, explore, ways_of


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_interleaving_shows_a_wrong_row_and_no_kill_loses_one(name):
    for way, options in ways_of(SCRIPTS[name], full=False).items():
        found = explore(SCRIPTS[name], **options)
        assert found.violations == [], way
        assert found.states + found.kills + found.cuts > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_readers_stay_right_beside_a_kill_and_the_next_writer(name):
    found = explore(SCRIPTS[name], kills=1)
    assert found.violations == []
    assert found.states > 10_000


@pytest.mark.parametrize(("variant", "script", "options"), VARIANTS, ids=[f"{v}, {s}" for v, s, _ in VARIANTS])
def test_a_wrong_variant_is_found(variant, script, options):
    assert explore(SCRIPTS[script], variant, **options).violations
