import torch

from tests.testing.test_conformance import other_ties, sound
from tieline.testing import RULES, router_habits


def test_habits_of_a_router_that_takes_the_higher_index():
    habits = router_habits(other_ties, RULES["softmax-of-chosen"], 16, 4)
    assert (habits.ties, habits.zeros) == ("higher index", "higher index")
    assert habits.ordered
    assert habits.same_bits
    assert (habits.masked, habits.nan) == ("NaN", "NaN")


def test_habits_of_a_stable_router_that_masks_what_is_not_finite():
    def router(logits, k):
        finite = logits.nan_to_num(nan=-torch.inf, posinf=1e30, neginf=-torch.inf)
        ids = finite.sort(dim=1, descending=True, stable=True).indices[:, :k]
        return ids, finite.gather(1, ids).softmax(dim=-1).nan_to_num(0.0)

    habits = router_habits(router, RULES["softmax-of-chosen"], 16, 4)
    assert (habits.ties, habits.masked, habits.infinite) == ("lower index", "zero", "finite")
    assert (habits.nan, habits.nan_chosen) == ("finite", 0.0)


def test_a_router_that_raises_says_so():
    def router(logits, k):
        raise RuntimeError("no")

    assert router_habits(router, RULES["softmax"], 8, 2).ties == "raises"


def test_bits_that_depend_on_the_batch_are_seen():
    def router(logits, k):
        weights, ids = sound(logits, k)
        return weights * (1 if len(logits) > 1 else 1 + 2**-23), ids

    assert not router_habits(router, RULES["softmax"], 8, 2).same_bits
