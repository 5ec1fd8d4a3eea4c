"""Sites measure a model on people whom they hold out: against a server, and sites, that cheat."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.flower import site as site_module
from fedveil.flower.federation_files import Federation, RegisteredSite
from fedveil.flower.federation_server import RemoteEngine
from fedveil.flower.messages import (
    Answer,
    Arrival,
    MetricsAnswer,
    MetricsAsk,
    Refusal,
    Reply,
    ServerMessage,
    from_parts,
    new_run_id,
    plan_digest,
    to_parts,
)
from fedveil.flower.metrics_round import Measured, ask_for_metrics
from fedveil.flower.policy import build_for_plan
from fedveil.flower.site import Site
from fedveil.flower.site_check import site_report
from fedveil.flower.site_ledger import METRICS
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Relation, Trust, Unit
from fedveil.privacy.ledger.file import read_charges
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.site_metrics import SiteMetrics, site_metrics
from fedveil.runs.build import build
from fedveil.runs.evidence import statements_of
from fedveil.runs.recipe import load_recipe
from tests.flower.conftest import NAMES, Trio, lines
from tests.flower.sites import CLASSES, FEATURES, LOCAL, open_site, witness, write_policy
from tests.flower.sites import Server as Asker
from tests.flower.transports import InProcess, Killed, dies, late, refuses, twice

PEOPLE, HELD_OUT, SHARE = 30, 400, 0.2
EVALUATE = {"epsilon": 2.0, "delta": 1e-4, "where": "site", "every": 1}
SITES: dict[str, Any] = {
    **LOCAL,
    "name": "measured",
    "rounds": 3,
    "sample": {"kind": "poisson", "rate": 0.5},
    "client": {"kind": "gradient", "unit": "record"},
    "noise": {"kind": "gaussian", "where": "site", "share": "whole", "source": "secure"},
    "budget": {"epsilon": 6.0, "delta": 1e-4},
    "server": {"lr": 2.0},
    "evaluate": EVALUATE,
}
POLICY: dict[str, Any] = {"epsilon": {"record": 100.0, "person": 100.0}, "delta": 0.1}
SEEDED: dict[str, Any] = {**SITES, "noise": {**SITES["noise"], "source": "seeded"}}
DP_SGD: dict[str, Any] = {
    **SITES,
    "sample": {"kind": "all"},
    "client": {"kind": "dp-sgd", "rate": 0.5, "steps": 1, "lr": 0.1},
    "noise": {"kind": "gaussian", "where": "training", "multiplier": 2.0, "source": "secure"},
}
PER_PERSON: dict[str, Any] = {**SITES, "client": {**SITES["client"], "unit": "person", "cap": 2}}


def own_records(seed: int, *, held_out: int = HELD_OUT, persons: bool = False) -> fv.FederatedData:
    """People to train on, two records each, and others held out: half of their labels are 0."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(PEOPLE + held_out, FEATURES)).astype(np.float32)
    y = np.arange(PEOPLE + held_out) % CLASSES
    y[PEOPLE:] = np.arange(held_out) % 2
    data = fv.FederatedData.from_clients(
        [("own", x[:PEOPLE], y[:PEOPLE])],
        test=(x[PEOPLE:], y[PEOPLE:]),
        test_owners=[f"held-out-{k}" for k in range(held_out)],
        classes=CLASSES,
    )
    if not persons:
        return data
    of_test = PEOPLE + np.arange(held_out) // 2
    return replace(data, persons=np.arange(PEOPLE) // 2, test_persons=of_test)


def site_at(folder: Path, recipe: dict[str, Any], number: int, **options: Any) -> Site:
    data = options.pop("data", None) or own_records(number, **options)
    sizes = [PEOPLE] * len(NAMES)
    name = NAMES[number]
    keys = {"name": name, "number": number, "sizes": sizes}
    policy = {**POLICY, "seeded": recipe["noise"].get("source") == "seeded"}
    return open_site(folder / name, recipe, policy, data, **keys)


def three(folder: Path, recipe: dict[str, Any] = SITES, **options: Any) -> Trio:
    """Three sites, each with people of its own held out, and nobody's rows at the server."""
    sites = {name: site_at(folder, recipe, k, **options) for k, name in enumerate(NAMES)}
    data = own_records(9)
    no_test = replace(data, test_x=data.test_x[:0], test_y=data.test_y[:0], test_owners=None)
    no_test.save(folder / "form")
    said = {**recipe, "data": {"name": "saved", "path": str(folder / "form")}}
    return Trio(folder, said, InProcess(dict(sites)), [])


def ask(site: Site, round: int = 1, attempt: int = 0, **changes: Any) -> MetricsAsk:
    plan = plan_digest(load_recipe(site.file.recipe), site.file.clients)
    params = site.training.start().params
    said = {"run": "0" * 32, "plan": plan, "params": params}
    return MetricsAsk(**{**said, "round": round, "attempt": attempt, **changes})


def measured(site: Site) -> int:
    """How many measurements the site was charged for."""
    if not site.ledger.file.exists():
        return 0
    return sum(charge.run.endswith(METRICS) for charge in read_charges(site.ledger.file))


def own_metrics(site: Site) -> SiteMetrics:
    assert isinstance(site.plan.metrics, SiteMetrics)
    return site.plan.metrics


def test_metrics_without_a_public_test_split(tmp_path: Path) -> None:
    """The run's metrics are those of all people held out, and each round was charged before."""
    trio = three(tmp_path)
    server = trio.server()
    result = server.serve()
    assert result["measured_after"] == 3
    rounds = lines(tmp_path / "run", "metrics.jsonl")
    assert [line["round"] for line in rounds if "accuracy" in line] == [1, 2, 3]
    params, means = trio.model("run"), []
    for number, site in enumerate(trio.transport.sites.values()):
        assert isinstance(site, Site)
        data = own_records(number)
        x, y = torch.tensor(np.array(data.test_x)), torch.tensor(np.array(data.test_y))
        found = site.training.task.measure_batch(params, x, y)
        means.append(found.per_example["accuracy"].double().mean().item())
    declared = [site.records for site in server.federation.sites]
    truth = np.average(means, weights=declared)  # each counts as no more than it declares
    last, off = rounds[-1], abs(rounds[-1]["accuracy"] - truth)
    assert off < 2.5 * last["accuracy/interval"] < 0.2  # 1.96 x 2.5 standard deviations
    (statement,) = statements_of(tmp_path / "run").runs
    claim = next(c for c in statement.claims if c.covers == "metrics of held-out owners")
    assert (claim.unit, claim.trust) == (Unit.RECORD, Trust.SITE)
    assert claim.neighbours is Relation.ADD_REMOVE
    assert claim.epsilon == pytest.approx(2.0, rel=1e-2)
    assert claim.epsilon <= 2.0


@pytest.mark.parametrize(
    "recipe",
    [SITES, pytest.param(DP_SGD, marks=pytest.mark.slow)],
    ids=["sites", "dp-sgd"],
)
def test_a_charge_is_on_both_ledgers_before_anything_leaves(
    tmp_path: Path, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trio = three(tmp_path, recipe)
    north = trio.transport.sites["north"]
    assert isinstance(north, Site)
    assert north.held_out is not None
    seen, noisy_sum = [], SiteMetrics.noisy_sum
    server = trio.server()

    def watched(self: SiteMetrics, *args: Any) -> torch.Tensor:
        at_server = read_charges(tmp_path / "run" / "ledger.db")
        seen.append((measured(north), sum(c.covers.startswith("metrics") for c in at_server)))
        return noisy_sum(self, *args)

    monkeypatch.setattr(SiteMetrics, "noisy_sum", watched)
    server.serve()
    assert seen == [(k, k) for k in (1, 2, 3) for _ in NAMES]


def test_the_owner_s_policy_pays_for_training_and_metrics(tmp_path: Path) -> None:
    """The cost that an owner sees, accepts and is charged has both, also if one comes alone."""
    site = site_at(tmp_path, SITES, 0)
    training, metrics = site.terms.costs
    assert metrics.epsilon == pytest.approx(2.0, rel=1e-2)
    assert [claim["epsilon"] for claim in site_report(site)["cost"]] == [
        training.epsilon,
        metrics.epsilon,
    ]
    limit = 1.001 * training.epsilon
    write_policy(tmp_path / "north", {**POLICY, "epsilon": {"record": limit}})
    site = Site.open(tmp_path / "north" / "site.toml")
    asker = Asker(site)
    for refused in (site.answer(ask(site)), asker.answer()):
        assert isinstance(refused, Refusal)
        assert refused.reason == "the run may cost more than policy.epsilon.record leaves"
    both = 1.001 * (training.epsilon + metrics.epsilon)
    write_policy(tmp_path / "north", {**POLICY, "epsilon": {"record": both}})
    site = Site.open(tmp_path / "north" / "site.toml")
    assert isinstance(site.answer(ask(site)), MetricsAnswer)
    (cost,) = site.ledger.run_costs().values()
    assert [claim.epsilon for claim in cost.costs] == [metrics.epsilon]
    assert isinstance(Asker(site, "0" * 32).answer(), Answer)
    (cost,) = site.ledger.run_costs().values()
    assert sum(claim.epsilon for claim in cost.costs) == pytest.approx(both / 1.001)
    other = Asker(site).answer()  # another run, for which nothing is left
    assert other.reason == "the run may cost more than policy.epsilon.record leaves"


def test_a_replayed_ask_for_metrics_is_refused(tmp_path: Path) -> None:
    """Twice, older, of another model: sums are sent once, whatever the server says."""
    site = site_at(tmp_path, SITES, 0)
    first = ask(site, 2)
    assert isinstance(site.answer(first), MetricsAnswer)
    for again in (first, ask(site, 2, params=first.params + 1), ask(site, 1)):
        refused: Any = site.answer(again)
        assert isinstance(refused, Refusal)
        assert "asked before" in refused.reason or "comes after" in refused.reason
    assert measured(site) == 1
    assert isinstance(Site.open(tmp_path / "north" / "site.toml").answer(first), Refusal)
    assert witness(site)["asks"] == 1
    (site.ledger.folder / "asks.db").unlink()  # put back to before the measurement
    assert isinstance(site.answer(ask(site, 3)), Refusal)
    assert measured(site) == 1


def test_a_site_measures_after_announced_rounds_alone(tmp_path: Path) -> None:
    site = site_at(tmp_path, {**SITES, "evaluate": {**EVALUATE, "every": 2}}, 0)
    assert own_metrics(site).rounds == (2, 3)
    for round in (1, 4):
        refused: Any = site.answer(ask(site, round))
        assert isinstance(refused, Refusal), round
    assert refused.reason.endswith("is beyond the plan's 3 rounds")
    assert measured(site) == 0
    assert isinstance(site.answer(ask(site, 2)), MetricsAnswer)


def test_no_more_measurements_than_planned_whatever_attempts_there_are(tmp_path: Path) -> None:
    site = site_at(tmp_path, {**SITES, "evaluate": {**EVALUATE, "every": 2}}, 0)
    answers: list[Any] = [site.answer(ask(site, 2, attempt)) for attempt in range(4)]
    assert [isinstance(answer, MetricsAnswer) for answer in answers] == [True, True, False, False]
    assert "has had the 2 measurements that this site permits" in answers[2].reason
    assert measured(site) == 2
    other: Any = site.answer(ask(site, 2, run=new_run_id()))
    assert isinstance(other, MetricsAnswer)  # of another run, which the policy counts


def test_another_plan_and_other_evaluations_are_refused(tmp_path: Path) -> None:
    """Noise, rounds and metrics are part of what both sides must agree on."""
    site = site_at(tmp_path, SITES, 0)
    digests = {
        plan_digest(load_recipe({**SITES, "evaluate": {**EVALUATE, **change}}), 3)
        for change in ({}, {"epsilon": 1.0}, {"every": 2}, {"loss_clip": 1.0}, {"metrics": []})
    }
    assert len(digests) == 5
    assert site.digest in digests
    (other, *_) = digests - {site.digest}
    refused: Any = site.answer(ask(site, plan=other))
    assert "the plan is not that" in refused.reason
    refused = site.answer(ask(site, params=torch.zeros(3)))
    assert "the model has 3 parameters" in refused.reason
    assert measured(site) == 0
    plain = {k: v for k, v in SITES.items() if k != "evaluate"}
    silent = site_at(tmp_path / "plain", plain, 0, held_out=0)
    refused = silent.answer(ask(silent))
    assert refused.reason == "the plan has no measurement after round 1"


def sums_of(site: Site, data: fv.FederatedData, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What the site would send of other records, with the noise of one seed."""
    monkeypatch.setattr(site_module.secrets, "randbits", lambda bits: 5)
    reply = Site(site.file, site.recipe, data).answer(ask(site, run=new_run_id()))
    assert isinstance(reply, MetricsAnswer)
    return reply.noisy_sums


def test_held_out_records_are_never_trained_on_and_trained_ones_never_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other records on one side change nothing on the other, to the last bit."""
    site, data = site_at(tmp_path, SEEDED, 0), own_records(0)
    monkeypatch.setattr(site_module.secrets, "randbits", lambda bits: 5)
    others = own_records(1)
    held_out = replace(data, test_x=others.test_x, test_y=np.zeros_like(others.test_y))
    trained = replace(data, x=others.x, y=others.y[::-1].copy())

    def report(records: fv.FederatedData) -> torch.Tensor:
        return Asker(Site(site.file, site.recipe, records)).answer().report

    assert torch.equal(report(held_out), report(data))
    assert not torch.equal(report(trained), report(data))
    assert torch.equal(sums_of(site, trained, monkeypatch), sums_of(site, data, monkeypatch))
    assert not torch.equal(sums_of(site, held_out, monkeypatch), sums_of(site, data, monkeypatch))


@pytest.mark.parametrize(("recipe", "rows"), [(SEEDED, 1), ("persons", 2)])
def test_one_person_moves_what_leaves_by_the_accounted_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Any, rows: int
) -> None:
    """Taking out one, with all records, moves the sums by 1 in all; per record two would."""
    persons = recipe == "persons"
    noise = {**SITES["noise"], "source": "seeded"}
    said = {**PER_PERSON, "noise": noise} if persons else SEEDED
    site, data = site_at(tmp_path, said, 0, persons=persons), own_records(0, persons=persons)
    assert own_metrics(site).line.unit is (Unit.PERSON if persons else Unit.RECORD)
    assert site.held_out is not None
    assert len(site.held_out) == HELD_OUT // rows
    y = np.array(data.test_y)
    y[:rows] = 0
    without = replace(
        data,
        test_x=data.test_x[rows:],
        test_y=y[rows:],
        test_owners=data.owners_of_test[rows:],
        test_persons=None if data.test_persons is None else data.test_persons[rows:],
    )
    moved = sums_of(site, data, monkeypatch) - sums_of(site, without, monkeypatch)
    assert 0.2**0.5 - 1e-6 <= float(moved.norm()) <= 1 + 1e-6  # it is counted, at least
    assert float(moved[-1]) == pytest.approx(0.2**0.5)


def test_people_on_both_sides_are_refused(tmp_path: Path) -> None:
    data = own_records(0, persons=True)
    assert data.test_persons is not None
    both = np.array(data.test_persons)
    both[7] = -1  # of somebody who has training records
    with pytest.raises(BadInput, match="each person's records must be on one side"):
        site_at(tmp_path / "a", PER_PERSON, 0, data=replace(data, test_persons=both))
    own = np.array(data.owners_of_test)
    own[7] = 0
    with pytest.raises(BadInput, match="each person's records must be on one side"):
        site_at(tmp_path / "b", SITES, 0, data=replace(own_records(0), test_owners=own))
    with pytest.raises(BadInput, match="nobody says whose the test records are"):
        site_at(tmp_path / "c", SITES, 0, data=replace(data, test_persons=None))
    with pytest.raises(BadInput, match="this site holds nobody out"):
        site_at(tmp_path / "d", SITES, 0, held_out=0)
    with pytest.raises(BadInput, match=r"evaluate.delta is 0.0001.*, not below 1 / 12000"):
        site_at(tmp_path / "e", SITES, 0, held_out=12_000)


def test_what_a_failed_measurement_tells_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record at which the model raises an error: zeros, with the noise and the charge."""
    site = site_at(tmp_path, SITES, 0)

    def fails(*args: Any) -> Any:
        raise RuntimeError("a record with 13 in it")

    monkeypatch.setattr("fedveil.flower.held_out.owner_means", fails)
    answer: Any = site.answer(ask(site))
    assert isinstance(answer, MetricsAnswer)
    assert measured(site) == 1
    assert own_metrics(site).refusal(answer.noisy_sums) == ""


def test_secure_noise_is_on_the_grid_and_never_the_same(tmp_path: Path) -> None:
    site = site_at(tmp_path, SITES, 0)
    metrics = own_metrics(site)
    sums = [site.answer(ask(site, round)).noisy_sums for round in (1, 2)]  # type: ignore[union-attr]
    assert site.plan.secure
    assert not torch.equal(*sums)  # of the same model
    grid = metrics.mechanism.grid(metrics.mechanism.multiplier, metrics.width)
    assert all(grid.holds(each) for each in sums)
    spread = metrics.mechanism.multiplier * 6
    count = sums[0][-1] / metrics.clip.weights[-1]
    assert abs(float(count) - HELD_OUT) < spread / metrics.clip.weights[-1]


def lies(**changes: Any) -> Any:
    """A site whose sums are others than those that it computed."""

    def behave(transport: InProcess, ask: ServerMessage, reply: Reply) -> list[Arrival]:
        if not isinstance(reply, MetricsAnswer):
            return [Arrival(reply.site, reply)]
        parts = {key: new(reply) if callable(new) else new for key, new in changes.items()}
        return [Arrival(reply.site, replace(reply, **parts))]

    return behave


def a_report(transport: InProcess, ask: ServerMessage, reply: Reply) -> list[Arrival]:
    if not isinstance(reply, MetricsAnswer):
        return [Arrival(reply.site, reply)]
    none = torch.zeros(0, dtype=torch.float64)
    return [Arrival(reply.site, Answer(reply.run, reply.round, reply.attempt, "south", none, none))]


LIES: dict[str, tuple[Any, str]] = {
    "nan": (lies(noisy_sums=lambda a: torch.full_like(a.noisy_sums, torch.nan)), "not finite"),
    "length": (lies(noisy_sums=lambda a: a.noisy_sums[:-1]), "another form"),
    "dtype": (lies(noisy_sums=lambda a: a.noisy_sums.float()), "another form"),
    "negative": (lies(noisy_sums=lambda a: a.noisy_sums - 1e4), "none that people can have"),
    "better than all right": (
        lies(noisy_sums=lambda a: a.noisy_sums * torch.tensor([9.0, 1.0, 1.0])),
        "none that people can have",
    ),
    "name": (lies(site="west"), "in the name of 'west'"),
    "run": (lies(run="1" * 32), "another run"),
    "attempt": (lies(attempt=3), "attempt 3"),
    "twice": (twice, "answered twice"),
    "a report": (a_report, "did not answer with metrics"),
}


class Honest:
    """A site of people, of whom three in four are right, and no more of it."""

    def __init__(self, name: str, metrics: SiteMetrics, people: int = 500) -> None:
        self.name, self.metrics = name, metrics
        self.means = torch.tensor([[1.0, 0.2], [1.0, 0.2], [1.0, 0.2], [0.0, 0.6]])
        self.means = self.means.repeat(people // 4, 1).double()

    def answer(self, ask: ServerMessage) -> Reply:
        streams = Streams(hash(self.name) % 2**64, secure=True)
        sums = self.metrics.noisy_sum(self.means, ask.round, streams)
        return MetricsAnswer(ask.run, ask.round, ask.attempt, self.name, sums)


METRICS_OF_THREE = site_metrics(
    ["accuracy", "loss"],
    3,
    budget=Budget(2.0, 1e-4),
    rounds=(1, 2, 3),
    loss_clip=2.0,
    unit=Unit.RECORD,
)
ASK = MetricsAsk("0" * 32, 2, 0, "a" * 64, torch.zeros(4))


def federation(records: int = 500) -> Federation:
    keys = [f"SHA256:{k:043d}" for k in range(3)]
    sites = [
        RegisteredSite(name=name, key=key, records=records)
        for name, key in zip(NAMES, keys, strict=True)
    ]
    return Federation(sites=sites, deadline=60.0)


def asked(
    behaviour: dict[str, Any] | None = None, records: int = 500
) -> tuple[Measured, dict[str, float]]:
    """What a server makes of three sites, some of whom misbehave."""
    sites = {name: Honest(name, METRICS_OF_THREE) for name in NAMES}
    transport = InProcess(dict(sites), behaviour=behaviour or {})
    known = federation(records)
    found = ask_for_metrics(ASK, METRICS_OF_THREE, known, transport, transport.clock)
    return found, METRICS_OF_THREE.combined(
        [*found.sums_by_site.values()], [records] * len(found.sums_by_site)
    )


@pytest.mark.parametrize("lie", LIES)
def test_a_site_that_lies_is_named_and_the_others_count(lie: str) -> None:
    behave, words = LIES[lie]
    found, metrics = asked({"south": behave})
    assert words in found.rejected["south"]
    assert {"north", "west"} <= {*found.sums_by_site} <= {*NAMES}
    assert ("south" in found.sums_by_site) is (lie == "twice")
    line = found.to_dict(ASK, [*NAMES])
    assert (line["measured"], line["absent"]) == (2, [])
    assert abs(metrics["accuracy"] - 0.75) < 3 * metrics["accuracy/interval"] < 0.3
    assert abs(metrics["loss"] - 0.6) < 3 * metrics["loss/interval"] < 0.6


def test_a_site_that_answers_late_or_declines_or_is_away() -> None:
    found, _ = asked({"west": late, "south": refuses})
    assert found.rejected == {"west": "it answered after the deadline"}
    assert found.declined == {"south": "no budget is left"}
    found, _ = asked({"south": dies})
    assert found.to_dict(ASK, [*NAMES])["absent"] == ["south"]


def test_a_site_that_claims_a_crowd_weighs_what_it_declares() -> None:
    """A million people of whom none is right count as those whom the site has declared."""
    crowd = torch.tensor([0.0, 0.0, 1e6 * 0.2**0.5], dtype=torch.float64)
    _, metrics = asked({"south": lies(noisy_sums=crowd)})
    assert abs(metrics["accuracy"] - 0.5) < 3 * metrics["accuracy/interval"] < 0.3
    _, metrics = asked({"south": lies(noisy_sums=crowd)}, records=0)  # nothing is declared
    assert metrics["accuracy"] < 0.01


def test_a_metric_of_nobody_is_not_shown() -> None:
    """A quotient of two noises is no number."""
    nobody = torch.zeros(3, dtype=torch.float64)
    found, metrics = asked(dict.fromkeys(NAMES, lies(noisy_sums=nobody)))
    assert len(found.sums_by_site) == 3
    assert metrics == {}
    assert asked(dict.fromkeys(NAMES, a_report))[1] == {}


def test_a_server_that_crashes_after_the_charge_measures_no_more_than_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 2 is measured twice, for the first time in vain: nothing is left for round 3."""
    trio, site_metrics_of = three(tmp_path), RemoteEngine.site_metrics

    def killed(self: RemoteEngine, params: torch.Tensor, round: int, attempt: int) -> Any:
        found = site_metrics_of(self, params, round, attempt)
        if (round, attempt) == (2, 0):
            raise Killed
        return found

    monkeypatch.setattr(RemoteEngine, "site_metrics", killed)
    with pytest.raises(Killed):
        trio.server().serve()
    trio.server().serve()
    charges = [c for c in read_charges(tmp_path / "run" / "ledger.db") if "metrics" in c.covers]
    assert [(c.round, c.attempt) for c in charges] == [(1, 0), (2, 0), (2, 1)]
    asked = [line["measured"] for line in lines(tmp_path / "run") if "measured" in line]
    assert asked == [1, 2, 2]
    for site in trio.transport.sites.values():
        assert isinstance(site, Site)
        assert measured(site) == 3
    shown = [line["round"] for line in lines(tmp_path / "run", "metrics.jsonl") if "loss" in line]
    assert shown == [1, 2]


def test_messages_about_metrics_survive_the_wire(tmp_path: Path) -> None:
    site = site_at(tmp_path, SITES, 0)
    asked = ask(site)
    read: Any = from_parts(*to_parts(asked))
    assert isinstance(read, MetricsAsk)
    assert torch.equal(read.params, asked.params)
    answer: Any = site.answer(read)
    back: Any = from_parts(*to_parts(answer))
    assert torch.equal(back.noisy_sums, answer.noisy_sums)
    with pytest.raises(BadInput, match="params holds a number that is not finite"):
        ask(site, params=asked.params * torch.nan)


CLIENT_LEVEL: dict[str, Any] = {**LOCAL, "evaluate": EVALUATE}


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (CLIENT_LEVEL, "the claim is about each site as a whole"),
        ({**SITES, "evaluate": {"where": "site"}}, "no effect without evaluate.epsilon"),
        ({**SITES, "evaluate": {**EVALUATE, "metrics": ["f1"]}}, "not one: omit it"),
    ],
)
def test_what_sites_cannot_measure_is_refused_in_one_line(
    recipe: dict[str, Any], words: str
) -> None:
    data = own_records(0)
    data = replace(data, test_x=data.test_x[:0], test_y=data.test_y[:0], test_owners=None)
    with pytest.raises(BadInput, match=words) as refused:
        build_for_plan(load_recipe(recipe), data.at_sites(NAMES, [30] * 3))
    assert "\n" not in str(refused.value)


def test_a_simulation_and_a_server_with_test_records_are_refused() -> None:
    data = own_records(0)
    with pytest.raises(BadInput, match="this run has no sites that measure"):
        build(load_recipe(SITES), data=data)
    with pytest.raises(BadInput, match="the server has 400 test records: leave out --test"):
        build_for_plan(load_recipe(SITES), data.at_sites(NAMES, [30] * 3))
