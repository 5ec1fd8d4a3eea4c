"""Which promise is the strongest is said of guarantees of one kind, and of nothing else."""

from dataclasses import replace

import pytest

from fedveil.privacy.accounting.claims import (
    Accountant,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.strongest import strongest_promise

CLAIM = PrivacyClaim(
    epsilon=2.0, delta=1e-5, unit=Unit.CLIENT, neighbours=Relation.ZERO_OUT, trust=Trust.CENTRAL,
    accountant=Accountant.PLD, noise=NoiseSource.SECURE,
)  # fmt: skip
TERMS = "at delta 1e-05 per client (zero-out, central trust)"


def claimed(**changes):
    return replace(CLAIM, **changes)


def test_the_smaller_epsilon_is_the_stronger_promise():
    eight = claimed(epsilon=8.0)
    sentence = f"b makes the stronger promise: epsilon 2 {TERMS}, against 8 of a."
    assert strongest_promise({"a": eight, "b": CLAIM}) == sentence
    assert strongest_promise({"b": CLAIM, "a": eight}) == sentence


def test_of_several_the_smallest_is_the_strongest():
    three = {"a": claimed(epsilon=8.0), "b": CLAIM, "c": claimed(epsilon=4.0)}
    sentence = f"b makes the strongest promise: epsilon 2 {TERMS}, against 4 of c and 8 of a."
    assert strongest_promise(three) == sentence
    several = strongest_promise({**three, "d": CLAIM})
    assert several.startswith("b and d make the strongest promise: epsilon 2 ")
    assert several.endswith("against 4 of c and 8 of a.")


def test_epsilons_that_are_shown_as_one_number_are_equal():
    sentence = f"The promises are equally strong: epsilon 2 {TERMS} each."
    assert strongest_promise({"a": CLAIM, "b": claimed(epsilon=2.0 - 1e-9)}) == sentence


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"unit": Unit.RECORD}, "the epsilons protect different units (client and record)"),
        (
            {"neighbours": Relation.REPLACE},
            "the epsilons use different definitions of neighbouring data sets (zero-out and",
        ),
        ({"trust": Trust.LOCAL}, "the runs trust different parties (central and local)"),
        ({"delta": 1e-6}, "the epsilons are at different deltas (1e-05 and 1e-06)"),
        ({"holds_for": "the median client"}, "the epsilons hold for different clients (everyone"),
        ({"covers": "updates and metrics"}, "the epsilons cover different releases (updates and"),
        ({"noise": NoiseSource.SEEDED}, "a run with seeded noise is a simulation (secure and"),
    ],
)
def test_promises_of_different_kinds_are_not_compared(changes, reason):
    found = strongest_promise({"a": CLAIM, "b": claimed(epsilon=0.1, **changes)})
    assert found.startswith(f"The promises cannot be compared: {reason}")


@pytest.mark.parametrize("other", [None, claimed(as_published=True), claimed(vouched=False)])
def test_what_is_no_guarantee_is_never_the_stronger_promise(other):
    """However small the epsilon that stands there."""
    small = None if other is None else replace(other, epsilon=0.01)
    assert strongest_promise({"a": small, "b": CLAIM}).startswith("Only b gives a guarantee")
    assert strongest_promise({"a": small, "b": other}).startswith("None of these runs gives")
    found = strongest_promise({"a": small, "b": CLAIM, "c": claimed(epsilon=1.0)})
    assert found.startswith("The promises cannot be compared: ")
    assert "a claims nothing" in found or "the epsilon of a is not a guarantee" in found
