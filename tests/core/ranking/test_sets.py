"""Whether and by how many experts two choices differ, against Python's own sets."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tieline.core.ranking import n_changed, sets_differ

rows = st.integers(1, 5).flatmap(
    lambda k: st.lists(
        st.tuples(*[st.permutations(range(6)).map(lambda order: order[:k])] * 2),
        min_size=1,
        max_size=6,
    )
)


@given(rows)
def test_both_forms_agree_with_python_sets(pairs):
    before, after = (torch.tensor(side) for side in zip(*pairs, strict=True))
    counts = [len(set(a) - set(b)) for a, b in pairs]
    assert n_changed(before, after).tolist() == counts
    masks = [torch.zeros(len(x), 6, dtype=torch.bool).scatter(1, x, True) for x in (before, after)]
    assert sets_differ(*masks).tolist() == [count > 0 for count in counts]
