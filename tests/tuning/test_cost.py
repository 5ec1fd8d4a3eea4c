"""What trainings cost together: the sums of all that was charged, by kind."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fedveil.privacy.accounting.claims import Trust
from fedveil.tuning.axes import axis, cells
from fedveil.tuning.cost import Cost, together
from fedveil.tuning.trials import Laboratory

SMALL = ("data.clients=20", "sample.size=5", "rounds=3", "engine.mode=looped")
BITS = ("clip.kind=quantile", "clip.value=0.05", "clip.bit_noise=2.0", "engine.mode=looped")
NORMS = (
    "clip.kind=median", "clip.value=1.0", "clip.low=-4", "clip.high=2", "clip.every=2",
    "clip.epsilon=3", "clip.delta=1e-5", "engine.mode=looped",
)  # fmt: skip


def prepared(recipe, settings, *axes):
    laboratory = Laboratory()
    return [laboratory.prepare(cell) for cell in cells(recipe, settings, list(map(axis, axes)))]


def test_trainings_of_one_kind_add_up():
    low, high = prepared("dp-fedavg", SMALL, "budget.epsilon=5,50")
    (one,) = together([(low, 3), (high, 1)])
    assert one.epsilon == pytest.approx(3 * low.claim.epsilon + high.claim.epsilon)
    assert (one.delta, one.unit, one.neighbours, one.trust) == (0, "client", "replace", "local")
    assert together([(low, 0)]) == []


@pytest.mark.parametrize("settings", [BITS, NORMS], ids=["bits", "norms"])
def test_what_a_curator_sees_is_in_the_sum(settings):
    """The server sees the updates and where the clip moved: one line for both, added whole."""
    (one,) = prepared("ldp-sgd", settings)
    (line,) = (line for line in one.plan.lines if not line.reading)
    (claim, *_) = line.claims(line.participations(one.plan.permitted))
    (whole,) = together([(one, 4)])
    assert (whole.epsilon, whole.delta) == pytest.approx((4 * claim.epsilon, 4 * claim.delta))
    assert whole.epsilon >= 4 * one.claim.epsilon


@pytest.mark.parametrize("trust", [Trust.CURATOR, Trust.CENTRAL])
def test_every_charged_line_is_added_and_the_most_trust_is_told(trust):
    (one,) = prepared("dp-fedavg-gaussian", SMALL)
    (line,) = one.plan.lines
    more = replace(line, covers="bits", trust=trust)
    twice = SimpleNamespace(plan=SimpleNamespace(lines=(line, more), permitted=3))
    (whole,) = together([(twice, 4)])
    assert whole.epsilon == pytest.approx(8 * one.claim.epsilon)
    assert whole.delta == pytest.approx(8 * one.claim.delta)
    assert whole.trust is trust


def test_as_published_keeps_its_label_and_its_strict_neighbour():
    (one,) = prepared("dp-fedavg", SMALL, "budget.as_published=true")
    published, strictly = together([(one, 2)])
    assert published.as_published
    assert not strictly.as_published
    assert published.epsilon == pytest.approx(2 * 20)
    assert strictly.epsilon == pytest.approx(2 * 40)
    (said,) = Cost.of([(one, 2)]).sentences
    assert "epsilon 40 at delta 0 per record" in said
    assert "as published, not a guarantee); strictly epsilon 80 at delta 0 per client" in said


def test_a_client_has_one_of_several_budgets():
    dealt = [*SMALL, "budget.epsilon=none", "budget.epsilons=[5.0, 50.0]"]
    (one,) = prepared("dp-fedavg", dealt)
    (whole,) = together([(one, 2)])
    assert whole.epsilon == pytest.approx(2 * 50)


def test_behind_a_shuffler_the_sum_without_it_stands_beside():
    (one,) = prepared("ldp-fl", ["rounds=2", "engine.mode=looped"])
    kinds = {claim.trust: claim for claim in together([(one, 2)])}
    assert set(kinds) == {"shuffled", "local"}
    assert kinds["local"].epsilon > kinds["shuffled"].epsilon
    assert {str(claim.unit) for claim in kinds.values()} == {"client"}


def test_kinds_are_never_added_to_each_other():
    (local,) = prepared("dp-fedavg", SMALL)
    central, same = prepared("central", ["engine.mode=looped", "rounds=2"], "client.lr=0.1,0.2")
    sums = together([(local, 1), (central, 1), (same, 2)])
    assert [str(claim.trust) for claim in sums] == ["local", "central"]
    assert sums[0].epsilon == local.claim.epsilon
    assert sums[1].epsilon == pytest.approx(3 * central.claim.epsilon)
    assert sums[1].delta == pytest.approx(3 * central.claim.delta)


def test_trainings_without_a_claim_are_counted():
    quiet, noisy = prepared("dp-fedavg", SMALL, "budget.epsilon=inf,5")
    cost = Cost.of([(quiet, 3), (noisy, 3)])
    assert (cost.trainings, cost.unclaimed) == (6, 3)
    together, unclaimed = cost.sentences
    assert together.startswith("together: 3 trainings on these records, whose epsilons and deltas")
    assert unclaimed.startswith("3 of 6 trainings claim nothing: no epsilon covers")
    assert Cost.of([(quiet, 3)]).sentences[0].startswith("3 of 3 trainings claim nothing")
    written = json.loads(json.dumps(cost.to_dict()))
    assert written["without_claim"] == 3
    assert written["add_up_to"][0]["epsilon"] == pytest.approx(15)
    assert written["add_up_to"][0]["neighbours"] == "replace"


def test_clients_that_differ_between_repetitions_are_told():
    (dealt,) = prepared("dp-fedavg", SMALL)
    (fixed,) = prepared("dp-fedavg", [*SMALL, "data.seed=1"])
    assert "divides the records differently (data.seed fixes them)" in Cost.of([(dealt, 2)]).told
    assert "differently" not in Cost.of([(fixed, 2)]).told
    assert "differently" not in Cost.of([(dealt, 1)]).told
