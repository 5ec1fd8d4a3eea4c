"""What trainings cost together: the sums of all that was charged, by kind."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import NoiseSource, Trust
from fedveil.tuning.recipe_grid import axis, cells
from fedveil.tuning.repetitions import Cost
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
    (one,), read = Cost([(low, 3), (high, 1)]).totals
    assert read == []
    assert one.epsilon == pytest.approx(
        3 * low.headline_claim.epsilon + high.headline_claim.epsilon
    )
    assert (one.delta, one.unit, one.neighbours, one.trust) == (0, "client", "replace", "local")
    assert Cost([(low, 0)]).totals == ([], [])


@pytest.mark.parametrize("settings", [BITS, NORMS], ids=["bits", "norms"])
def test_what_a_curator_sees_is_in_the_sum(settings):
    """The server sees the updates and where the clip moved: one line for both, added whole."""
    (one,) = prepared("ldp-sgd", settings)
    (line,) = (line for line in one.plan.lines if not line.reading)
    (claim, *_) = line.claims(line.participations(one.plan.permitted))
    (whole,), _ = Cost([(one, 4)]).totals
    assert (whole.epsilon, whole.delta) == pytest.approx((4 * claim.epsilon, 4 * claim.delta))
    assert whole.epsilon >= 4 * one.headline_claim.epsilon


@pytest.mark.parametrize("trust", [Trust.CURATOR, Trust.CENTRAL])
def test_every_charged_line_is_added_and_the_most_trust_is_told(trust):
    (one,) = prepared("dp-fedavg-gaussian", SMALL)
    (line,) = one.plan.lines
    more = replace(line, covers="bits", trust=trust)
    twice = SimpleNamespace(plan=SimpleNamespace(lines=(line, more), permitted=3))
    (whole,), _ = Cost([(twice, 4)]).totals
    assert whole.epsilon == pytest.approx(8 * one.headline_claim.epsilon)
    assert whole.delta == pytest.approx(8 * one.headline_claim.delta)
    assert whole.trust is trust


def test_as_published_keeps_its_label_and_its_strict_neighbour():
    (one,) = prepared("dp-fedavg", SMALL, "budget.as_published=true")
    (published,), (strictly,) = Cost([(one, 2)]).totals
    assert published.as_published
    assert not strictly.as_published
    assert published.epsilon == pytest.approx(2 * 20)
    assert strictly.epsilon == pytest.approx(2 * 40)
    (said,) = Cost([(one, 2)]).sentences
    assert "epsilon 40 at delta 0 per record" in said
    assert "as published, not a guarantee); strictly epsilon 80 at delta 0 per client" in said


def test_a_client_has_one_of_several_budgets():
    dealt = [*SMALL, "budget.epsilon=none", "budget.epsilons=[5.0, 50.0]"]
    (one,) = prepared("dp-fedavg", dealt)
    (whole,), _ = Cost([(one, 2)]).totals
    assert whole.epsilon == pytest.approx(2 * 50)


def test_behind_a_shuffler_the_sum_without_it_stands_beside():
    (one,) = prepared("ldp-fl", ["rounds=2", "engine.mode=looped"])
    (shuffled,), (local,) = Cost([(one, 2)]).totals
    assert (shuffled.trust, local.trust) == ("shuffled", "local")
    assert local.epsilon > shuffled.epsilon
    assert {str(claim.unit) for claim in (shuffled, local)} == {"client"}
    assert "; with less trust epsilon " in Cost([(one, 2)]).totals_text


def test_mechanisms_and_accountants_are_one_number():
    """Five trainings with Laplace noise and five with Gaussian noise, of epsilon 3 each: 30."""
    (laplace,) = prepared("dp-fedavg", [*SMALL, "budget.epsilon=3"])
    (gaussian,) = prepared("dp-fedavg-gaussian", [*SMALL, "budget.epsilon=3"])
    cost = Cost([(laplace, 5), (gaussian, 5)])
    (whole,) = cost.totals[0]
    assert whole.epsilon == pytest.approx(30, rel=1e-3)
    assert whole.delta == pytest.approx(5 * gaussian.headline_claim.delta)
    assert (str(whole.accountant), whole.composed, cost.totals[1]) == ("pld", None, [])
    (said,) = cost.sentences
    assert said.count("epsilon ") == 1
    (turned,) = Cost([(gaussian, 5), (laplace, 5)]).totals[0]
    assert (turned.epsilon, turned.accountant) == (pytest.approx(whole.epsilon), whole.accountant)
    assert set(whole.assumptions) == {
        *laplace.headline_claim.assumptions,
        *gaussian.headline_claim.assumptions,
    }


def test_a_total_is_as_trusting_and_as_weak_as_its_weakest_part():
    (one,) = prepared("dp-fedavg-gaussian", SMALL)
    (line,) = one.plan.lines

    def of(**changes):
        lines = (replace(line, **changes),)
        return SimpleNamespace(plan=SimpleNamespace(lines=lines, permitted=3))

    def total(**changes):
        return [
            Cost([(a, 1), (b, 2)]).totals[0]
            for a, b in ((one, of(**changes)), (of(**changes), one))
        ]

    assert all(whole.trust is Trust.SHUFFLED for (whole,) in total(trust=Trust.SHUFFLED))
    assert all(whole.as_published for (whole,) in total(as_published=True))
    assert not any(whole.vouched for (whole,) in total(vouched=0.1))
    assert all(whole.noise == "seeded" for (whole,) in total(noise=NoiseSource.SECURE))
    assert {len(whole.assumptions) for (whole,) in total(assumptions=("other",))} == {
        len(line.assumptions) + 1
    }


def test_readings_are_added_to_what_has_no_other_reading():
    (published,) = prepared("dp-fedavg", SMALL, "budget.as_published=true")
    (strict,) = prepared("dp-fedavg", SMALL)
    _, (whole,) = Cost([(published, 1), (strict, 1)]).totals
    assert whole.epsilon == pytest.approx(40 + 20)
    assert not whole.as_published


def test_different_neighbours_are_never_added_and_none_is_said_to_be_the_total():
    (local,) = prepared("dp-fedavg", SMALL)
    central, same = prepared("central", ["engine.mode=looped", "rounds=2"], "client.lr=0.1,0.2")
    trainings = [(local, 1), (central, 1), (same, 2)]
    sums, _ = Cost(trainings).totals
    assert [str(claim.trust) for claim in sums] == ["local", "central"]
    assert sums[0].epsilon == local.headline_claim.epsilon
    assert sums[1].epsilon == pytest.approx(3 * central.headline_claim.epsilon)
    assert sums[1].delta == pytest.approx(3 * central.headline_claim.delta)
    assert "none of them is the total" in Cost(trainings).totals_text
    assert "none of them is the total" not in Cost(trainings[1:]).totals_text


def test_what_is_added_up_answers_for_no_other_number_of_units():
    (one,) = prepared("dp-fedavg-gaussian", SMALL)
    ((alone,), _), ((both,), _) = Cost([(one, 1)]).totals, Cost([(one, 2)]).totals
    assert alone.for_units(2).epsilon > alone.epsilon
    with pytest.raises(BadInput, match="does not record what was composed"):
        both.for_units(2)


def test_trainings_without_a_claim_are_counted():
    quiet, noisy = prepared("dp-fedavg", SMALL, "budget.epsilon=inf,5")
    cost = Cost([(quiet, 3), (noisy, 3)])
    assert (cost.to_dict()["trainings"], cost.to_dict()["without_claim"]) == (6, 3)
    together, unclaimed = cost.sentences
    assert together.startswith("together: 3 trainings on these records, whose epsilons and deltas")
    assert unclaimed.startswith("3 of 6 trainings claim nothing: no epsilon covers")
    assert Cost([(quiet, 3)]).sentences[0].startswith("3 of 3 trainings claim nothing")
    written = json.loads(json.dumps(cost.to_dict()))
    assert written["without_claim"] == 3
    assert written["add_up_to"][0]["epsilon"] == pytest.approx(15)
    assert written["add_up_to"][0]["neighbours"] == "replace"


def test_clients_that_differ_between_repetitions_are_told():
    (dealt,) = prepared("dp-fedavg", SMALL)
    (fixed,) = prepared("dp-fedavg", [*SMALL, "data.seed=1"])
    assert (
        "divides the records differently (data.seed fixes them)" in Cost([(dealt, 2)]).totals_text
    )
    assert "differently" not in Cost([(fixed, 2)]).totals_text
    assert "differently" not in Cost([(dealt, 1)]).totals_text
