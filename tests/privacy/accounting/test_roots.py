"""Roots of functions of every kind."""

import math

import pytest

from fedveil.privacy.accounting.closed_forms import root

FUNCTIONS = {
    "a line": (lambda x: 3 * x - 1, 0.0, 2.0, 1 / 3),
    "falling": (lambda x: 1 - x**3, 0.5, 40.0, 1.0),
    "flat at its root": (lambda x: (x - 1) ** 9, -3.0, 2.5, 1.0),
    "nearly a step": (lambda x: math.tanh(1e6 * (x - 0.3)), -1.0, 1.0, 0.3),
    "a real step": (lambda x: 1.0 if x > 0.7 else -1e3, -5.0, 1.0, 0.7),
    "huge on one side": (lambda x: math.exp(x) - 2, -100.0, 600.0, math.log(2)),
    "cut off": (lambda x: max(math.log(x), -1e3), 1e-9, 1e4, 1.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("xtol", [1e-3, 1e-12])
def test_it_is_where_the_sign_changes(name, xtol):
    function, low, high, exact = FUNCTIONS[name]
    calls = []
    found = root(lambda x: calls.append(x) or function(x), low, high, xtol=xtol)
    assert found == pytest.approx(exact, rel=1e-14, abs=xtol)
    assert len(calls) < 120
    assert all(low <= x <= high for x in calls)


def test_an_end_may_be_the_root():
    assert root(lambda x: x, 0.0, 1.0, xtol=1e-9) == 0.0
    assert root(lambda x: x - 1, 0.0, 1.0, xtol=1e-9) == 1.0


def test_no_change_of_sign():
    with pytest.raises(ValueError, match="is 1 at 0 and 2 at 1: no root"):
        root(lambda x: x + 1, 0.0, 1.0, xtol=1e-9)
