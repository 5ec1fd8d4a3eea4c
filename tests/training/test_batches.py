"""Batches: every record once per pass, the same whoever else is in the chunk."""

from itertools import chain

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.privacy.noise.streams import Streams
from fedveil.training.cohort import Batches, CohortData, FullBatch

IDS, SIZES = np.array([4, 9, 2, 7]), np.array([7, 1, 4, 10])


def records(plan, row):
    """The records of client `row` in each of its steps."""
    steps = []
    for step in range(plan.steps):
        batch = plan.batch(step)
        real = batch.mask[row].bool()
        if bool(real.any()):
            index = torch.arange(batch.mask.shape[1]) if batch.index is None else batch.index[row]
            steps.append(index[real].tolist())
    return steps


def plan_of(batches, ids=IDS, sizes=SIZES, round=3, seed=1):
    return batches.for_round(ids, sizes, round, Streams(seed))


@pytest.mark.parametrize("size", [0, 1, 3, 4, 10, 50])
def test_every_record_once_per_pass(size):
    plan = plan_of(Batches(size, epochs=3))
    for row, n in enumerate(SIZES):
        steps = records(plan, row)
        per_pass = -(-int(n) // (size or int(n)))
        assert len(steps) == 3 * per_pass
        for start in range(0, len(steps), per_pass):
            assert sorted(chain(*steps[start : start + per_pass])) == list(range(n))


def test_batches_are_full_but_for_the_last():
    plan = plan_of(Batches(3, epochs=1))
    assert [len(step) for step in records(plan, 3)] == [3, 3, 3, 1]
    assert [len(step) for step in records(plan, 1)] == [1]


@pytest.mark.parametrize("batches", [Batches(3, epochs=4), Batches(3, steps=9)])
def test_batches_do_not_depend_on_the_other_clients(batches):
    together = plan_of(batches)
    for row in range(len(IDS)):
        alone = plan_of(batches, IDS[row : row + 1], SIZES[row : row + 1])
        assert records(alone, 0) == records(together, row)


def test_batches_do_not_depend_on_the_order_of_the_chunk():
    forward, backward = (
        plan_of(Batches(3, epochs=2), IDS[order], SIZES[order])
        for order in (slice(None), slice(None, None, -1))
    )
    assert records(forward, 0) == records(backward, len(IDS) - 1)


def test_orders_differ_by_pass_round_client_and_seed():
    sizes = np.array([50, 50])
    base = plan_of(Batches(5, epochs=2), np.array([0, 1]), sizes)
    first, second = records(base, 0)[:10], records(base, 0)[10:]
    others = [
        second,
        records(base, 1)[:10],
        records(plan_of(Batches(5, epochs=1), np.array([0]), sizes[:1], round=4), 0),
        records(plan_of(Batches(5, epochs=1), np.array([0]), sizes[:1], seed=2), 0),
    ]
    assert all(first != other for other in others)


def test_first_positions_are_uniform():
    """Chi-square over 10 records, 9 degrees of freedom; above 45 with probability 1e-6."""
    ids = np.arange(20_000)
    plan = plan_of(Batches(1, epochs=1), ids, np.full(len(ids), 10))
    counts = np.bincount(plan.batch(0).index[:, 0].numpy(), minlength=10)
    assert ((counts - 2000) ** 2 / 2000).sum() < 45


def test_steps_are_the_same_for_everyone_and_go_on_into_further_passes():
    plan = plan_of(Batches(3, steps=5))
    assert plan.steps == 5
    for row, n in enumerate(SIZES):
        steps = records(plan, row)
        assert len(steps) == 5
        per_pass = -(-int(n) // 3)
        for start in range(0, 5 - per_pass + 1, per_pass):
            assert sorted(chain(*steps[start : start + per_pass])) == list(range(n))


def test_steps_begin_like_epochs():
    by_steps, by_epochs = plan_of(Batches(3, steps=4)), plan_of(Batches(3, epochs=1))
    assert records(by_steps, 3) == records(by_epochs, 3)


def test_a_client_that_is_done_is_idle():
    plan = plan_of(Batches(3, epochs=1))
    assert plan.steps == 4
    assert plan.batch(3).mask.amax(dim=1).tolist() == [0, 0, 0, 1]


def test_the_full_batch_is_all_records_in_one_step():
    plan = plan_of(Batches(0, epochs=2))
    assert plan.steps == 2
    assert plan.batch(1).mask.sum(dim=1).tolist() == SIZES.tolist()


@pytest.mark.parametrize("batches", [Batches(0, epochs=2), Batches(4, steps=5)], ids=str)
@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [2], [3, 1]], ids=str)
def test_a_client_alone_sees_its_real_records_and_no_padding(make_data, batches, ids):
    cohort = CohortData(make_data(tuple(SIZES)), np.array(ids))
    plan = plan_of(batches, cohort.ids, cohort.sizes)
    for step in range(plan.steps):
        batch = plan.batch(step)
        for k in range(len(ids)):
            real = batch.mask[k].bool()
            index = torch.arange(cohort.longest) if batch.index is None else batch.index[k]
            x, y = batch.client_records(cohort, k)
            assert torch.equal(x, cohort.x[k][index[real]])
            assert torch.equal(y, cohort.y[k][index[real]])


def test_a_client_whose_turn_is_over_sees_nothing():
    done = FullBatch(np.array([0, 3]), 3)
    assert done.idle.tolist() == [True, False]
    assert done.mask.tolist() == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "set exactly one of epochs and steps"),
        ({"size": 0, "epochs": 1, "steps": 1}, "exactly one"),
        ({"size": 0, "epochs": 0}, "epochs is 0"),
        ({"size": 0, "steps": -1}, "steps is -1"),
        ({"size": -1, "epochs": 1}, "size is -1"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(BadInput, match=message):
        Batches(**arguments)
