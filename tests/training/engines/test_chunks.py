"""The tree of chunk sums: one order of additions, wherever its branches are added."""

import numpy as np
import pytest
import torch

from fedveil.training.engines.serial import FAN_IN, Branch, SumTree
from fedveil.training.reports import CohortSum

COUNTS = (0, 1, 7, 8, 9, 16, 63, 64, 65, 71, 72, 73, 512, 521, 600)


def zero():
    return CohortSum.zero(3, 1, noisy=True, keep=True)


def chunk(number):
    """A sum whose numbers round differently in every order."""
    drawn = np.random.default_rng(number)
    total = zero()
    total.total += torch.from_numpy(drawn.normal(size=3) * 10.0 ** drawn.integers(-8, 8, size=3))
    total.signal += torch.from_numpy(drawn.normal(size=3))
    total.statistic_values += number
    total.weight, total.clients, total.refused = drawn.random(), 1, (number,)
    total.updates_by_client += [(np.array([number]), torch.full((1, 3), float(number)))]
    return total


def added(branches):
    tree = SumTree(zero)
    for branch in branches:
        tree.add_(branch)
    return tree.finish()


def one_by_one(count):
    return added(Branch(chunk(k)) for k in range(count))


def by_hand(sums):
    """The definition: groups of eight in a row, and groups of those, until one is left."""
    while len(sums) > 1:
        groups = [sums[a : a + FAN_IN] for a in range(0, len(sums), FAN_IN)]
        sums = [sum(group[1:], start=group[0]) for group in groups]
    return sums[0]


@pytest.mark.parametrize("count", COUNTS[1:])
def test_chunks_are_added_in_groups_of_eight_in_chunk_order(count):
    expected = by_hand([chunk(k).total for k in range(count)])
    assert torch.equal(one_by_one(count).total, expected)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("count", COUNTS)
def test_branches_of_any_level_come_to_the_same_to_the_last_bit(count, level):
    block = FAN_IN**level
    parts = [range(a, min(a + block, count)) for a in range(0, count, block)]
    branches = [Branch(added(Branch(chunk(k)) for k in part), level) for part in parts]
    found, expected = added(branches), one_by_one(count)
    assert torch.equal(found.total, expected.total)
    assert torch.equal(found.signal, expected.signal)
    assert torch.equal(found.statistic_values, expected.statistic_values)
    assert (found.weight, found.clients) == (expected.weight, expected.clients)
    assert found.refused == tuple(range(count))
    assert [int(ids[0]) for ids, _ in found.updates_by_client] == list(range(count))


def test_another_order_would_be_noticed():
    sums = [chunk(k).total for k in range(64)]
    assert not torch.equal(by_hand(sums), sum(sums[1:], start=sums[0]))
    assert not torch.equal(by_hand(sums), by_hand(sums[::-1]))


@pytest.mark.parametrize(("count", "sums"), [(1, 1), (8, 1), (9, 2), (72, 2), (73, 3), (512, 3)])
def test_up_to_eight_chunks_need_one_sum_and_eight_times_as_many_one_more(count, sums):
    tree = SumTree(zero)
    for k in range(count):
        tree.add_(Branch(chunk(k)))
    assert len(tree._levels) == sums
