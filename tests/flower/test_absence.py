"""Sites that do not answer: noise, charge and divisor stay, and nobody can tell."""

import pytest
import torch

from fedveil.flower import federation_server
from fedveil.flower.federation_server import TooFewSites
from fedveil.privacy.ledger.file import read_charges
from tests.flower import transports
from tests.flower.conftest import AT_SITES, FREE, NAMES, SECURE, SEEDED, lines, proven
from tests.flower.sites import CENTRAL, FEDAVG, LOCAL
from tests.flower.transports import HOSTILE, changed

ALL = {"kind": "all"}
POISSON = {**CENTRAL, "noise": SECURE, "budget": FREE}
AT_SERVER = {**POISSON, "sample": ALL}
AT_SITE = {**LOCAL, "noise": AT_SITES, "budget": FREE}


def test_noise_divisor_and_charge_do_not_depend_on_who_answers(stand_ins, monkeypatch):
    """Of a site that sends zero and one that sends nothing, models are the same to the last bit.

    The three runs have one name, so that they share their noise, as no two runs do.
    """
    monkeypatch.setattr(federation_server, "new_run_id", lambda: "0" * 32)
    models, epsilons = [], []
    zero = changed(report=lambda a: torch.zeros_like(a.report))
    for name, behaviour in (("zero", zero), ("dies", transports.dies), ("nan", HOSTILE["nan"])):
        three = stand_ins({**AT_SERVER, "noise": SEEDED, "rounds": 2})
        three.transport.behaviour["west"] = behaviour
        epsilons.append(three.server(name).serve()["claims"][0]["epsilon"])
        models.append(three.model(name))
        assert epsilons[-1] == proven(three, name)
        assert len(read_charges(three.folder / name / "ledger.db")) == 2
    assert len(set(epsilons)) == 1
    assert torch.equal(models[0], models[1])
    assert torch.equal(models[0], models[2])


@pytest.mark.parametrize("recipe", [AT_SERVER, AT_SITE, FEDAVG])
def test_too_few_answers_leave_the_model_and_keep_the_charge(stand_ins, recipe):
    three = stand_ins({**recipe, "rounds": 2, "server": {"momentum": 0.9}})
    three.transport.behaviour = {"north": transports.dies, "west": transports.refuses}
    result = three.server(minimum=2).serve()
    assert result["rounds"] == 2
    assert torch.equal(three.model("run"), three.transport.asks[0].params)
    assert [outcome.enough for outcome in three.outcomes] == [False, False]
    assert "too few" in str(three.outcomes[0])
    if result["claims"]:
        assert len(read_charges(three.folder / "run" / "ledger.db")) == 2
        assert result["claims"][0]["epsilon"] > 0


def test_as_many_as_the_minimum_are_enough(stand_ins):
    three = stand_ins({**AT_SITE, "rounds": 1})
    three.transport.behaviour = {"north": transports.dies}
    three.server(minimum=2).serve()
    assert three.outcomes[0].enough
    assert not torch.equal(three.model("run"), three.transport.asks[0].params)


def test_a_report_that_diverged_is_an_answer(stand_ins):
    """Whether it did depends on records, so it must not decide whether a round counts."""
    three = stand_ins({**AT_SERVER, "rounds": 1})
    three.transport.behaviour = {"north": HOSTILE["nan"], "west": HOSTILE["nan"]}
    three.server(minimum=3).serve()
    assert three.outcomes[0].enough


def test_where_the_cohort_is_secret_too_few_answers_cannot_be_seen(stand_ins):
    three = stand_ins({**POISSON, "rounds": 3})
    three.transport.behaviour = dict.fromkeys(NAMES, transports.dies)
    three.server(minimum=3).serve()
    assert all(outcome.enough for outcome in three.outcomes)
    losses = [line["loss"] for line in lines(three.folder / "run", "metrics.jsonl")]
    assert len(set(losses)) == 4  # the noise moves every model


def test_where_the_cohort_is_secret_a_round_takes_its_whole_time(stand_ins):
    three = stand_ins({**POISSON, "rounds": 3})
    three.server(deadline=50.0).serve()
    assert three.transport.now == 150.0
    told = lines(three.folder / "run", "metrics.jsonl")[1:]
    assert [(line["clients"], line["seconds"], line["refused"]) for line in told] == [
        (None, None, None)
    ] * 3


@pytest.mark.parametrize("recipe", [{**POISSON, "noise": SEEDED}, AT_SERVER, AT_SITE])
def test_otherwise_it_ends_when_all_have_answered(stand_ins, recipe):
    three = stand_ins({**recipe, "rounds": 2})
    three.server(deadline=50.0).serve()
    assert three.transport.slept == 0.0


@pytest.mark.parametrize(
    ("recipe", "secret"),
    [
        (POISSON, True),
        ({**POISSON, "sample": {"kind": "fixed", "size": 2}}, True),
        ({**POISSON, "sample": {"kind": "fixed", "size": 3}}, False),
        ({**POISSON, "sample": {"kind": "poisson", "rate": 1.0}}, False),
        ({**POISSON, "sample": {"kind": "round-robin", "size": 2}}, False),
        ({**AT_SITE, "sample": {"kind": "poisson", "rate": 0.5}}, False),
        ({**FEDAVG, "sample": {"kind": "poisson", "rate": 0.5}}, False),
    ],
)
def test_a_cohort_is_secret_where_the_claim_is_amplified_by_it(stand_ins, recipe, secret):
    assert stand_ins(recipe).server().run.training.plan.secret_cohort is secret


def test_who_is_asked_is_drawn_from_all_that_are_registered(stand_ins):
    """Online or not: with two of three sites away, they are asked as often as the third."""
    three = stand_ins({**POISSON, "noise": SEEDED, "rounds": 40})
    three.transport.away = {"north", "south"}
    result = three.server(minimum=1).serve()
    asked = {name: sum(name in o.invited for o in three.outcomes) for name in NAMES}
    assert result["rounds"] == 40
    assert min(asked.values()) >= 5  # of 40 at rate 1/2: fewer once in three million runs
    assert all(set(o.answered) <= {"west"} for o in three.outcomes)


def test_nothing_is_charged_before_enough_sites_are_online(stand_ins):
    three = stand_ins({**AT_SITE, "rounds": 3})
    three.transport.away = {"west"}
    with pytest.raises(TooFewSites, match="2 are online"):
        three.server(minimum=3).serve()
    assert not (three.folder / "run" / "ledger.db").exists()
    three.transport.away = set()

    def leave(line):
        three.transport.away = {"west"} if line["round"] == 2 else set()

    with pytest.raises(TooFewSites):
        three.server(minimum=3).serve(leave)
    assert len(read_charges(three.folder / "run" / "ledger.db")) == 2
    three.transport.away = set()
    assert three.server(minimum=3).serve()["rounds"] == 3
    assert len(read_charges(three.folder / "run" / "ledger.db")) == 3
