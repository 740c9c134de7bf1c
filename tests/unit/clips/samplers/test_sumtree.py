"""The sum tree against a plain array; its frequencies; its check against vandals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringmap.clips.sumtree import SumTree


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_finds_what_a_running_sum_finds(data):
    size = data.draw(st.sampled_from([1, 2, 31, 32, 33, 1000, 2048, 2049, 70_000]))
    seed = data.draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    tree, plain = SumTree(size), np.zeros(size)
    for _ in range(data.draw(st.integers(1, 6))):
        if rng.random() < 0.5:
            slots = rng.integers(0, size, rng.integers(1, 300))
            masses = np.where(rng.random(len(slots)) < 0.3, 0.0, rng.integers(0, 1000, len(slots)))
            tree.set(slots, masses)
            for slot, mass in zip(slots.tolist(), masses, strict=True):
                plain[slot] = mass
        else:
            start = int(rng.integers(0, size))
            count = int(rng.integers(0, size - start + 1))
            masses = rng.integers(0, 9, count).astype(float)
            tree.fill(start, masses, count)
            plain[start : start + count] = masses
        np.testing.assert_array_equal(tree.leaves, plain)
        assert tree.check() == []
        assert tree.total == plain.sum()  # integers: exact
        if plain.any():
            asked = rng.integers(0, int(plain.sum()), 200) + rng.choice([0, 0.5], 200)
            expected = plain.cumsum().searchsorted(asked, side="right")
            np.testing.assert_array_equal(tree.find(asked), expected)
            assert not len(tree.find(asked[:0]))


@pytest.mark.parametrize("size", [5, 5000])
def test_a_leaf_without_mass_is_never_found_whatever_is_rounded(size):
    rng = np.random.default_rng(0)
    for scale in (1e-300, 1e-12, 1.0, 1e300 / size):
        tree, plain = SumTree(size), np.zeros(size)
        some = rng.choice(size, max(1, size // 10), replace=False)
        plain[some] = rng.random(len(some)) * scale * 10.0 ** -rng.integers(0, 8, len(some))
        tree.set(some, plain[some])
        edges = np.concatenate([plain.cumsum(), np.nextafter(plain.cumsum(), 0), [0.0, tree.total]])
        found = tree.find(edges)
        assert (plain[found] > 0).all()


def test_rounding_finds_no_empty_leaf(monkeypatch):
    """Masses at the edges of 20,000 leaves among 70,000. The control: with one descent, without bounds, some fall on
    empty leaves."""
    rng, empty, once = np.random.default_rng(0), 0, SumTree._find
    for _ in range(200):
        tree, plain = SumTree(70_000), np.zeros(70_000)
        some = rng.choice(70_000, 20_000, replace=False)
        plain[some] = rng.random(len(some))
        tree.set(some, plain[some])
        sums = plain.cumsum()
        edges = np.concatenate([sums, np.nextafter(sums, 0)])
        assert (plain[tree.find(edges)] > 0).all()
        with monkeypatch.context() as patch:
            patch.setattr(SumTree, "_find", lambda tree, masses, _: once(tree, masses, False))
            empty += int((plain[tree.find(edges)] <= 0).sum())
        if empty:
            break
    assert empty


def chi_squared(counts, chances):
    expected = chances * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_frequencies():
    """1,000 leaves of 1 to 1,000, 1,000,000 draws: chi-squared of 999 degrees has mean 999, deviation 45."""
    rng = np.random.default_rng(0)
    tree, masses = SumTree(1000), rng.permutation(np.arange(1.0, 1001))
    tree.set(np.arange(1000), masses)
    found = np.concatenate([tree.find(rng.random(10_000) * tree.total) for _ in range(100)])
    counts = np.bincount(found, minlength=1000)
    value = chi_squared(counts, masses / masses.sum())
    assert value < 999 + 4 * 45, value
    wrong = masses.copy()  # a control: two leaves of a thousand exchanged
    wrong[[0, 1]] = wrong[[1, 0]] if abs(wrong[0] - wrong[1]) > 100 else (wrong[:2] * 3)
    assert chi_squared(counts, wrong / wrong.sum()) > 999 + 4 * 45


@pytest.mark.parametrize("level", [0, 1])
def test_check_finds_vandals(level):
    tree = SumTree(70_000)
    tree.set(np.arange(100), np.ones(100))
    tree._levels[level][3] += 1
    assert set(tree.check()) == {"sum tree: a parent is not the sum of its children"}


def test_check_finds_negative_and_stray_leaves():
    tree = SumTree(33)
    tree.set(np.array([0]), np.array([-1.0]))
    assert tree.check() == ["sum tree: a leaf is negative or no number"]
    tree = SumTree(33)
    tree._levels[0][40] = 1
    assert "sum tree: a leaf beyond the last one has a mass" in tree.check()
