"""A ledger that runs share: one budget for all, whoever charges and whenever."""

import multiprocessing
import threading

import numpy as np
import pytest

from fedveil.base.errors import BadInput, BudgetExhausted, LedgerMismatch
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import NoiseSource, Relation, Trust, Unit
from fedveil.privacy.accounting.events import Gaussian, Shuffled, TwoPoint
from fedveil.privacy.ledger.file import read_charges, read_participations, read_runs
from fedveil.privacy.ledger.hash_chain import verify
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.privacy.ledger.shared import Common, RenyiFilter, common_of, renyi_curve, spent_in

LIMIT, DELTA = 3.0, 1e-5
EVENT = Gaussian(20.0)
CURVE = renyi_curve(EVENT, Relation.ZERO_OUT)


def affordable(curve=CURVE, epsilon=LIMIT, delta=DELTA):
    """How many releases of a curve a filter admits."""
    filter, count = RenyiFilter(epsilon, delta), 0
    while filter.admits(count * curve, curve):
        count += 1
    return count


def about(run, seed=None):
    return {"run": run, "recipe": "r", "data": "d", "seed": run if seed is None else seed}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.db"


@pytest.fixture
def opened(path, make_line):
    """A run on the shared ledger, which the first one makes."""
    ledgers = []

    def make(run, *, clients=0, permitted=10_000, epsilon=LIMIT, data="d", seed=None, **terms):
        lines = (make_line(**{"event": EVENT, **terms}),)
        common = Common.from_lines(lines, data, epsilon)
        open = Ledger.join if path.exists() else Ledger.create
        ledgers.append(open(path, LedgerRun(about(run, seed), lines, permitted, clients, common)))
        return ledgers[-1]

    yield make
    for ledger in ledgers:
        ledger.close()


def charge_all(ledger, start=1, ids=None):
    """Charge rounds until the budget ends it; returns how many."""
    for round in range(start, 100_000):
        try:
            ledger.charge(round, ids)
        except BudgetExhausted:
            return round - start
    raise AssertionError("no budget ended it")


# --- one budget for all ---


def test_runs_one_after_the_other_stop_at_the_common_budget(opened, path):
    first, most = opened("one", permitted=5), affordable()
    assert charge_all(first) == 5
    second = opened("two")
    assert charge_all(second) == most - 5
    with pytest.raises(BudgetExhausted, match="the common budget of epsilon 3 that all runs"):
        opened("three").charge(1)
    assert len(read_charges(path)) == most
    assert first.shared.spent() == second.shared.spent() <= LIMIT


def test_runs_in_turns_stop_at_the_common_budget(opened, path):
    ledgers = [opened(name) for name in "abc"]
    for round in range(1, affordable() // 3 + 1):
        for ledger in ledgers:
            ledger.charge(round)
    left = affordable() % 3
    assert sum(charge_all(ledger, affordable() // 3 + 1) for ledger in ledgers) == left
    assert len(read_charges(path)) == affordable()


def test_a_run_counts_its_own_rounds(opened):
    first, second = opened("one"), opened("two")
    for round in (1, 2, 3):
        first.charge(round)
    assert (first.charged(), second.charged()) == (3, 0)
    with pytest.raises(AssertionError, match="charged after 0 rounds"):
        second.charge(3)
    second.charge(1)
    assert (first.charged(), second.charged()) == (3, 1)


def test_the_runs_own_budget_still_counts(opened):
    ledger = opened("one", permitted=2)
    assert charge_all(ledger) == 2
    with pytest.raises(BudgetExhausted, match="permits 2 rounds"):
        ledger.charge(3)


def test_runs_of_different_noise_share_the_budget(opened, path):
    """Curves are added up order by order, whatever their events are."""
    opened("one", permitted=40).charge(1)
    filter, spent = RenyiFilter(LIMIT, DELTA), CURVE.copy()
    curve, count = renyi_curve(Gaussian(45.0), Relation.ZERO_OUT), 0
    while filter.admits(spent, curve):
        spent, count = spent + curve, count + 1
    assert charge_all(opened("two", event=Gaussian(45.0))) == count
    assert spent_in(path, common_of(path)) == pytest.approx(filter.epsilon_of(spent))


def test_events_per_participation_are_counted(opened):
    assert charge_all(opened("one", per=7)) == affordable(7 * CURVE)


def test_a_replay_with_seeded_noise_is_free_even_when_nothing_is_left(opened, path):
    ledger = opened("one")
    done = charge_all(ledger)
    for round in range(1, done + 1):
        assert ledger.charge(round) == 0
    assert len(read_charges(path)) == done


def test_a_repeated_round_with_secure_noise_is_charged(opened, path):
    ledger = opened("one", noise=NoiseSource.SECURE)
    before = ledger.charge(1), ledger.shared.spent()
    assert ledger.charge(1) == 1
    assert ledger.shared.spent() > before[1]
    assert len(read_charges(path)) == 2


def test_a_run_that_was_closed_goes_on_where_it_was(opened, path, make_line):
    opened("one", permitted=30)
    charge_all(opened("two", permitted=4))
    lines = (make_line(event=EVENT),)
    again = Ledger.reopen(
        path, LedgerRun(about("two"), lines, 4, 0, Common.from_lines(lines, "d", LIMIT))
    )
    assert (again.charged(), again.charge(2)) == (4, 0)
    with pytest.raises(BudgetExhausted):
        again.charge(5)
    again.close()


# --- who is charged ---


def test_clients_are_charged_for_their_own_turns(opened, path):
    """Two halves of the clients: each has the whole budget for itself."""
    local = {"trust": Trust.LOCAL, "relation": Relation.REPLACE}
    low, high = np.arange(5), np.arange(5, 10)
    assert charge_all(opened("one", clients=10, **local), ids=low) == affordable()
    assert charge_all(opened("two", clients=10, **local), ids=high) == affordable()
    third = opened("three", clients=10, **local)
    for ids in (low, high, np.array([0]), np.array([4, 5])):
        with pytest.raises(BudgetExhausted):
            third.charge(1, ids)
    assert read_participations(path, "three").sum() == 0


def test_one_client_without_budget_stops_the_round_of_all(opened):
    local = {"trust": Trust.LOCAL, "relation": Relation.REPLACE}
    ledger = opened("one", clients=4, **local)
    done = charge_all(ledger, ids=np.array([3]))
    with pytest.raises(BudgetExhausted):
        ledger.charge(done + 1, np.array([0, 1, 2, 3]))
    assert ledger.charge(done + 1, np.array([0, 1, 2])) == 0


def test_round_robin_charges_each_client_for_its_turn(opened, path):
    local = {"trust": Trust.LOCAL, "relation": Relation.REPLACE}
    ledger, most = opened("one", clients=6, **local), affordable()
    for round in range(1, 3 * most + 1):
        turn = (round - 1) % 3
        ledger.charge(round, np.array([2 * turn, 2 * turn + 1]))
    assert set(read_participations(path).tolist()) == {most}
    with pytest.raises(BudgetExhausted):
        ledger.charge(3 * most + 1, np.array([0, 1]))


def test_what_all_have_spent_is_what_the_one_who_spent_most_has(opened, path):
    ledger = opened("one", clients=3, trust=Trust.LOCAL, relation=Relation.REPLACE)
    filter = RenyiFilter(LIMIT, DELTA)
    for round, ids in enumerate(([0, 1], [0], [0, 2]), 1):
        ledger.charge(round, np.array(ids))
        assert ledger.shared.spent() == filter.epsilon_of(round * CURVE)
    assert spent_in(path, common_of(path)) == filter.epsilon_of(3 * CURVE)


def test_an_empty_cohort_costs_nobody_anything(opened):
    local = {"trust": Trust.LOCAL, "relation": Relation.REPLACE}
    ledger = opened("one", clients=3, **local)
    done = charge_all(ledger, ids=np.arange(3))
    spent = ledger.shared.spent()
    assert ledger.charge(done + 1, np.array([], dtype=np.int64)) == 0
    assert ledger.shared.spent() == spent


def test_another_number_of_counted_clients_is_refused(opened, path):
    """Client 7 of one run must be client 7 of the other."""
    opened("one", clients=10).charge(1, np.array([9]))
    for clients in (0, 5, 20):
        with pytest.raises(LedgerMismatch, match="turns of 10 clients"):
            opened(f"with {clients}", clients=clients)
    assert list(read_runs(path)) == ["one"]


def test_counts_of_repeated_attempts_are_those_of_the_clients_asked(path, make_line):
    """An attempt at an earlier round comes last, although its round does not."""
    lines = (make_line(noise=NoiseSource.SECURE, trust=Trust.LOCAL, relation=Relation.REPLACE),)
    ledger = Ledger.create(path, LedgerRun(about("one"), lines, 100, 8))
    for round in (1, 2, 3):
        ledger.charge(round, np.array([round]))
    ledger.close()
    again = Ledger.reopen(path, LedgerRun(about("one"), lines, 100, 8))
    assert again.turns(3).tolist() == [0, 1, 1, 1, 0, 0, 0, 0]
    again.charge(2, np.array([6]))
    assert again.turns(3).tolist() == [0, 1, 1, 1, 0, 0, 1, 0]
    again.charge(3, np.array([7]))
    assert again.turns(3).tolist() == [0, 1, 1, 1, 0, 0, 1, 1]
    assert again.counts().tolist() == read_participations(path).tolist()
    again.close()


# --- what does not go together ---


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"unit": Unit.RECORD}, "common unit"),
        ({"relation": Relation.REPLACE}, "common neighbours"),
        ({"trust": Trust.LOCAL}, "common trust"),
        ({"budget": Budget(3.0, 1e-6)}, "common delta"),
        ({"noise": NoiseSource.SECURE}, "common noise"),
        ({"data": "other"}, "common data"),
        ({"epsilon": 4.0}, "common epsilon"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_that_promises_something_else_is_refused(opened, path, changes, told):
    opened("one").charge(1)
    before = path.read_bytes()
    with pytest.raises(LedgerMismatch, match=told) as error:
        opened("two", **changes)
    assert "\n" not in str(error.value)
    assert list(read_runs(path)) == ["one"]
    assert path.read_bytes() == before


def test_a_seed_is_used_once(opened, path):
    """The same noise on two releases: their difference has none, and nothing composes."""
    opened("one", seed="1")
    with pytest.raises(LedgerMismatch, match="seed 1 was used by the run 'one'"):
        opened("two", seed="1")
    opened("two", seed="2")
    assert list(read_runs(path)) == ["one", "two"]


def test_secure_noise_needs_no_seed(opened, path):
    for name in ("one", "two"):
        opened(name, seed="", noise=NoiseSource.SECURE)
    assert list(read_runs(path)) == ["one", "two"]


def test_a_name_is_used_once(opened):
    opened("one")
    with pytest.raises(LedgerMismatch, match="there is a run 'one' already"):
        opened("one", seed="7")


def test_a_runs_own_ledger_is_not_shared(path, make_line):
    lines = (make_line(),)
    Ledger.create(path, LedgerRun(about("one"), lines, 5)).close()
    assert common_of(path) is None
    with pytest.raises(LedgerMismatch, match="not set in the ledger"):
        Ledger.join(
            path, LedgerRun(about("two"), lines, 5, 0, Common.from_lines(lines, "d", LIMIT))
        )


@pytest.mark.parametrize("count", [0, 2])
def test_only_one_claim_can_be_shared(make_line, count):
    lines = tuple(make_line(covers=f"line {k}") for k in range(count))
    with pytest.raises(BadInput, match="exactly one claim"):
        Common.from_lines(lines, "d", LIMIT)


@pytest.mark.parametrize("changes", [{"as_published": True}, {"reading": True}])
def test_only_a_strict_claim_can_be_shared(make_line, changes):
    with pytest.raises(BadInput, match="exactly one claim"):
        Common.from_lines((make_line(**changes),), "d", LIMIT)


def test_an_event_without_a_curve_is_refused(opened):
    with pytest.raises(BadInput, match="cannot count shuffled"):
        opened("one", event=Shuffled(TwoPoint(1.0), 10))


# --- secure noise has a share of delta ---


def test_secure_noise_keeps_a_share_of_delta_for_its_sampler(make_line):
    seeded = Common.from_lines((make_line(),), "d", LIMIT)
    secure = Common.from_lines((make_line(noise=NoiseSource.SECURE),), "d", LIMIT)
    assert seeded.filter.delta == DELTA
    assert secure.filter.delta == pytest.approx(DELTA * (1 - 2**-10), rel=1e-12)
    assert (secure.filter.order_limits < seeded.filter.order_limits).all()


def test_a_common_epsilon_too_large_for_the_sampler_is_refused(make_line):
    common = Common.from_lines((make_line(noise=NoiseSource.SECURE),), "d", 40.0)
    with pytest.raises(BadInput, match="cannot be vouched for"):
        _ = common.filter


# --- many at once ---


def test_threads_that_charge_at_once_never_overspend(path, opened, make_line):
    opened("first", permitted=0)
    lines, done, errors = (make_line(event=EVENT),), [], []
    start = threading.Barrier(6)

    def work(name):
        try:
            common = Common.from_lines(lines, "d", LIMIT)
            ledger = Ledger.join(path, LedgerRun(about(name), lines, 10_000, 0, common))
            start.wait()
            done.append(charge_all(ledger))
            ledger.close()
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(f"t{k}",)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(done) == len(read_charges(path)) == affordable()
    assert verify(path).length == affordable()


def charge_at_random(path, name, lines, ready, done):
    """A process with cohorts of its own, until a client is at its limit."""
    common = Common.from_lines(lines, "d", LIMIT)
    ledger = Ledger.join(path, LedgerRun(about(name), lines, 10_000, 8, common))
    ready.wait()
    random, rounds = np.random.default_rng(int(name)), 0
    try:
        while True:
            ledger.charge(rounds + 1, np.sort(random.choice(8, size=3, replace=False)))
            rounds += 1
    except BudgetExhausted:
        done.put(rounds)


def test_processes_that_charge_at_once_never_overspend(path, opened, make_line):
    """Three processes with random cohorts: at the end no client is beyond the filter."""
    local = {"trust": Trust.LOCAL, "relation": Relation.REPLACE}
    opened("0", clients=8, permitted=0, **local)
    lines = (make_line(event=EVENT, **local),)
    fork = multiprocessing.get_context("fork")
    ready, done = fork.Barrier(3), fork.Queue()
    workers = [
        fork.Process(target=charge_at_random, args=(path, name, lines, ready, done))
        for name in "123"
    ]
    for worker in workers:
        worker.start()
    rounds = sum(done.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    counts = sum(read_participations(path, name) for name in "123")
    assert rounds == len(read_charges(path))
    assert counts.sum() == 3 * rounds
    assert 0.5 * affordable() < counts.max() <= affordable()
    assert verify(path).length == rounds
    assert spent_in(path, common_of(path)) <= LIMIT
