"""Sums of chunks add up to the sum of the cohort, in everything they hold."""

import pytest

from fedveil.training.reports import CohortSum


def filled(value, noisy):
    made = CohortSum.zero(3, 2, noisy=noisy)
    made.total += value
    made.statistic_values += 10 * value
    if made.signal is not None:
        made.signal += 100 * value
    made.weight, made.clients, made.clipped_clients = value / 2, value, value + 1
    made.refused = (value,)
    return made


@pytest.mark.parametrize("noisy", [True, False])
def test_everything_adds_up(noisy):
    total = CohortSum.zero(3, 2, noisy=noisy)
    for value in (1, 2, 4):
        total.add_(filled(value, noisy))
    assert total.total.tolist() == [7.0] * 3
    assert total.statistic_values.tolist() == [70.0] * 2
    assert (total.signal is None) != noisy
    assert not noisy or total.signal.tolist() == [700.0] * 3
    assert (total.weight, total.clients, total.clipped_clients) == (3.5, 7, 10)
    assert total.refused == (1, 2, 4)


@pytest.mark.parametrize("noisy", [True, False])
def test_parts_of_a_sum_do_not_overlap(noisy):
    made = CohortSum.zero(3, 2, noisy=noisy)
    made.total += 1
    made.statistic_values += 2
    if made.signal is not None:
        made.signal += 4
    assert made.numbers.tolist() == [1.0] * 3 + [4.0] * 3 * noisy + [2.0] * 2
