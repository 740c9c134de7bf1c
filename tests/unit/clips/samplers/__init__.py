def chi_squared(counts, chances):
    """Return how far counts are from what these chances promise."""
    expected = chances * counts.sum()
    assert expected.min() > 5
    return float(((counts - expected) ** 2 / expected).sum())
