"""A site against a server that asks what, when and how often it likes."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.flower import site as site_module
from fedveil.flower.messages import Answer, Refusal
from fedveil.flower.site import Site
from tests.flower.sites import (
    CENTRAL,
    DP_SGD,
    FEDAVG,
    LOCAL,
    POLICY,
    QUANTILE,
    TWO_POINT,
    Server,
    charges,
    open_site,
    records,
    write_site,
)

OPEN = {**POLICY, "epsilon": {"client": 1000.0, "record": 1000.0}, "delta": 0.1, "seeded": True}
SEEDED = {**LOCAL, "noise": {**LOCAL["noise"], "source": "seeded"}}


def refused(answer: Any, *words: str) -> None:
    assert isinstance(answer, Refusal), answer
    for word in words:
        assert word in answer.reason


def test_a_report_is_charged_before_the_work_begins(tmp_path: Path, monkeypatch: Any) -> None:
    site = open_site(tmp_path)
    seen = []

    def report(*args: Any) -> Any:
        seen.append(charges(site))
        return real(*args)

    real = site_module.client_report
    monkeypatch.setattr(site_module, "client_report", report)
    answer = Server(site).answer()
    assert isinstance(answer, Answer)
    assert (answer.site, answer.report.shape, answer.report.dtype) == (
        "north",
        (15,),
        torch.float32,
    )
    assert seen == [1]


@pytest.mark.parametrize("recipe", [LOCAL, SEEDED, FEDAVG], ids=lambda r: r["name"])
def test_an_ask_is_answered_once(tmp_path: Path, recipe: dict[str, Any]) -> None:
    path = write_site(tmp_path, recipe, {**OPEN, "unprotected": True})
    server = Server(Site.open(path))
    first = server.answer()
    assert isinstance(first, Answer)
    spent = charges(server.site)
    for asker in (server, Server(Site.open(path), server.run)):
        again = asker.answer()  # the same, bit for bit
        assert torch.equal(again.report, first.report)
        assert torch.equal(again.watched, first.watched)
    refused(server.answer(params=server.ask().params + 1), "asked before")
    assert charges(server.site) == spent


def test_what_is_older_than_the_last_ask_is_refused(tmp_path: Path) -> None:
    server = Server(open_site(tmp_path))
    assert isinstance(server.answer(2, 1), Answer)
    refused(server.answer(1), "comes after")
    refused(server.answer(2, 0), "comes after")
    assert charges(server.site) == 1
    assert isinstance(server.answer(3), Answer)
    refused(server.answer(2, 2), "comes after")
    assert charges(server.site) == 2


@pytest.mark.parametrize("recipe", [LOCAL, SEEDED], ids=["secure", "seeded"])
def test_each_answer_has_noise_and_a_charge_of_its_own(
    tmp_path: Path, recipe: dict[str, Any]
) -> None:
    path = write_site(tmp_path, recipe, OPEN)
    a, b = Server(Site.open(path)), Server(Site.open(path))
    answers = [a.answer(1), b.answer(1), a.answer(1, 1), a.answer(1, 2)]
    assert charges(a.site) == 4
    reports = [answer.report for answer in answers]
    apart = [(x - y).abs().min() for x in reports for y in reports if x is not y]
    assert min(apart) > 0  # each difference has noise of the two in every coordinate


@pytest.mark.parametrize("recipe", [LOCAL, SEEDED, CENTRAL], ids=["secure", "seeded", "central"])
def test_randomness_is_the_operating_systems(
    tmp_path: Path, monkeypatch: Any, recipe: dict[str, Any]
) -> None:
    site = open_site(tmp_path, recipe, OPEN)
    streams: list[Any] = []
    real = site_module.client_report

    def report(work: Any, plan: Any, batch: Any) -> Any:
        streams.append(batch.round.streams)
        return real(work, plan, batch)

    monkeypatch.setattr(site_module, "client_report", report)
    server = Server(site)
    assert all(isinstance(server.answer(round), Answer) for round in (1, 2))
    assert [each.secure for each in streams] == [recipe is not SEEDED] * 2
    assert len({each.seed for each in streams}) == 2
    assert min(each.seed for each in streams) > 2**80  # but for one time in 2^48


def test_attempts_use_up_the_turns_of_the_plan(tmp_path: Path) -> None:
    server = Server(open_site(tmp_path, LOCAL, OPEN))
    answers = [server.answer(1, attempt) for attempt in (0, 1, 4)]
    assert all(isinstance(answer, Answer) for answer in answers)
    assert isinstance(server.answer(2), Answer)
    refused(server.answer(3), "4 turns")
    assert charges(server.site) == 4


def test_an_owner_may_give_turns_beyond_the_plan_within_the_budget(tmp_path: Path) -> None:
    exact = open_site(tmp_path / "exact", LOCAL, {**OPEN, "repeats": 2})
    assert (exact.terms.planned_turns, exact.terms.permitted_turns) == (4, 4)
    spare = open_site(tmp_path / "spare", TWO_POINT, {**OPEN, "repeats": 2})
    assert (spare.terms.planned_turns, spare.terms.permitted_turns) == (4, 6)
    plain = spare.plan.lines[0]
    assert spare.terms.costs[0].epsilon == plain.claims(6)[0].epsilon > plain.claims(4)[0].epsilon


def test_runs_at_once_are_charged_apart(tmp_path: Path) -> None:
    site = open_site(tmp_path, LOCAL, {**OPEN, "epsilon": {"client": 12.5}})
    one, two, three = Server(site), Server(site), Server(site)
    for round in (1, 2):
        assert isinstance(one.answer(round), Answer)
        assert isinstance(two.answer(round), Answer)
    refused(three.answer(), "policy.epsilon.client")
    assert charges(site) == 4
    assert len(site.ledger.run_costs()) == 2


def test_rounds_beyond_the_plan_are_refused(tmp_path: Path) -> None:
    server = Server(open_site(tmp_path))
    refused(server.answer(5), "beyond the plan")
    refused(server.answer(1, 5), "beyond the plan")
    assert charges(server.site) == 0
    with pytest.raises(BadInput, match="round"):
        server.ask(0)


def test_another_plan_is_refused(tmp_path: Path) -> None:
    site = open_site(tmp_path)
    weaker = {**LOCAL, "budget": {"epsilon": 20.0, "delta": 1e-5}}
    other = Server(open_site(tmp_path / "other", weaker))
    refused(site.answer(other.ask()), "own copy")
    more = open_site(tmp_path / "more", LOCAL, clients=4)
    refused(site.answer(Server(more).ask()), "own copy")
    assert charges(site) == 0


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


@pytest.mark.parametrize(
    ("recipe", "moving"),
    [
        (LOCAL, one(500.0)),
        (LOCAL, one(0.0)),
        (LOCAL, one(-0.5)),
        (LOCAL, one(0.5000001)),
        (LOCAL, torch.zeros(0, dtype=torch.float64)),
        (LOCAL, torch.full((2,), 0.5, dtype=torch.float64)),
        (QUANTILE, one(0.6)),
        (TWO_POINT, torch.tensor([0.0, 0.0, 0.15, 15.0], dtype=torch.float64)),
        (TWO_POINT, torch.tensor([0.1, 0.0, 0.15, 0.15], dtype=torch.float64)),
        (TWO_POINT, one(0.15)),
    ],
)
def test_a_clip_out_of_reach_is_refused(
    tmp_path: Path, recipe: dict[str, Any], moving: torch.Tensor
) -> None:
    server = Server(open_site(tmp_path, recipe, OPEN))
    refused(server.answer(moving=moving), "cannot be")
    assert charges(server.site) == 0


def test_an_adaptive_clip_may_move_as_far_as_it_can(tmp_path: Path) -> None:
    server = Server(open_site(tmp_path, QUANTILE, OPEN))
    refused(server.answer(2, moving=one(0.5 * 2.72**7)), "cannot be")
    answer = server.answer(2, moving=one(0.5 * 2.71**5))
    assert isinstance(answer, Answer)
    assert answer.watched.shape == (1,)
    refused(server.answer(3, moving=one(1e-15)), "cannot be")


@pytest.mark.parametrize("size", [3e38, 1e-45])
@pytest.mark.parametrize("recipe", [LOCAL, TWO_POINT, DP_SGD], ids=lambda r: r["name"])
def test_a_model_that_is_a_probe_gets_noise_like_any_other(
    tmp_path: Path, recipe: dict[str, Any], size: float
) -> None:
    server = Server(open_site(tmp_path, recipe, OPEN))
    answer = server.answer(params=torch.full((15,), size))
    assert isinstance(answer, Answer)
    assert torch.isfinite(answer.report).all()
    assert (answer.report != 0).all()
    assert charges(server.site) == 1


def test_noise_follows_the_clip_that_is_used(tmp_path: Path) -> None:
    """15 standard normals have a square sum of 0.3 to 90, but for 1e-7 of the time."""
    server = Server(open_site(tmp_path, QUANTILE, OPEN))
    multiplier = server.site.plan.release.multiplier
    for round, clip in ((1, 0.5), (2, 0.5 * 2.7**5), (3, 0.5 * 2.7**-8)):
        answer = server.answer(round, moving=one(clip))
        scaled = answer.report.double() / (2 * clip * multiplier)
        assert 0.3 < float((scaled**2).sum()) < 150  # with a signal of at most 1 / (2 multiplier)


def test_a_model_of_another_size_is_refused(tmp_path: Path) -> None:
    server = Server(open_site(tmp_path))
    refused(server.answer(params=torch.zeros(14)), "14 parameters")
    for params in (torch.full((15,), torch.nan), torch.zeros(15, dtype=torch.float64)):
        with pytest.raises(BadInput, match="params"):
            server.ask(params=params)
    assert charges(server.site) == 0


def test_a_crash_after_the_charge_loses_the_ask_and_keeps_the_charge(
    tmp_path: Path, monkeypatch: Any
) -> None:
    path = write_site(tmp_path)
    server = Server(Site.open(path))

    def killed(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(site_module, "client_report", killed)
        with pytest.raises(KeyboardInterrupt):
            server.answer()
    assert charges(server.site) == 1
    again = Server(Site.open(path), server.run)
    refused(again.answer(), "asked before")
    assert isinstance(again.answer(1, 1), Answer)
    assert charges(again.site) == 2


def test_a_crash_between_the_ask_and_the_charge_releases_nothing(
    tmp_path: Path, monkeypatch: Any
) -> None:
    from fedveil.privacy.ledger.ledger import Ledger

    path = write_site(tmp_path)
    server = Server(Site.open(path))

    def killed(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(Ledger, "charge", killed)
        with pytest.raises(KeyboardInterrupt):
            server.answer()
    again = Server(Site.open(path), server.run)
    refused(again.answer(), "asked before")
    assert charges(again.site) == 0
    assert isinstance(again.answer(1, 1), Answer)
    assert charges(again.site) == 1


@pytest.mark.parametrize("recipe", [LOCAL, TWO_POINT, QUANTILE], ids=lambda r: r["name"])
def test_work_that_fails_is_a_randomised_zero(
    tmp_path: Path, monkeypatch: Any, recipe: dict[str, Any]
) -> None:
    site = open_site(tmp_path, recipe, OPEN)

    def fail(*args: Any, **keys: Any) -> Any:
        raise RuntimeError("the record of Ada is odd")

    monkeypatch.setattr(type(site.training.work), "updates", fail)
    answer = Server(site).answer()
    assert isinstance(answer, Answer)
    assert torch.isfinite(answer.report).all()
    assert (answer.report != 0).all()
    assert answer.watched.shape == (site.plan.width,)


def test_work_that_fails_where_nothing_is_randomised_tells_nothing(
    tmp_path: Path, monkeypatch: Any
) -> None:
    site = open_site(tmp_path, CENTRAL, OPEN)

    def fail(*args: Any, **keys: Any) -> Any:
        raise RuntimeError("the record of Ada is odd")

    monkeypatch.setattr(type(site.training.work), "updates", fail)
    answer = Server(site).answer()
    refused(answer, "could not be computed")
    assert "Ada" not in answer.reason


def test_a_secret_cohort_is_charged_for_every_round_at_once(tmp_path: Path) -> None:
    server = Server(open_site(tmp_path, CENTRAL, OPEN))
    assert isinstance(server.answer(2), Answer)
    assert charges(server.site) == 4
    assert isinstance(server.answer(4), Answer)
    assert charges(server.site) == 4
    refused(server.answer(4, 1), "4 turns")


def test_a_round_that_a_trusted_server_repeats_is_within_the_rounds_of_the_plan(
    tmp_path: Path,
) -> None:
    server = Server(open_site(tmp_path, CENTRAL, OPEN))
    assert isinstance(server.answer(1), Answer)
    assert isinstance(server.answer(1, 2), Answer)
    assert isinstance(server.answer(2), Answer)  # the fourth release that the site knows of
    refused(server.answer(3), "4 turns")
    assert charges(server.site) == 4


def test_an_update_without_noise_is_no_longer_than_the_clip(tmp_path: Path) -> None:
    data = records()
    data.x[:] *= 1e4
    server = Server(open_site(tmp_path, CENTRAL, OPEN, data))
    report = server.answer().report
    assert 0.49 < float(report.double().norm()) <= 0.5


def test_threads_and_sites_on_one_ledger_charge_for_every_answer(tmp_path: Path) -> None:
    path = write_site(tmp_path, {**SEEDED, "rounds": 12}, OPEN)
    sites = [Site.open(path), Site.open(path)]
    answers: list[Any] = []

    def work(site: Site) -> None:
        server = Server(site)
        answers.extend(server.answer(round) for round in range(1, 5))

    threads = [threading.Thread(target=work, args=(site,)) for site in sites for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(answer, Answer) for answer in answers) == 16 == charges(sites[0])


def test_records_that_change_in_the_middle_of_a_run_are_refused(tmp_path: Path) -> None:
    path = write_site(tmp_path, LOCAL, OPEN)
    server = Server(Site.open(path))
    assert isinstance(server.answer(), Answer)
    records(seed=1).save(tmp_path / "newer")
    path.write_text(path.read_text().replace("records", "newer", 1))
    changed = Site.open(path)
    refused(Server(changed, server.run).answer(2), "ledger cannot be used")
    assert charges(changed) == 1
    assert isinstance(Server(changed).answer(), Answer)
