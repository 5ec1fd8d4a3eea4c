"""Runs with secure noise: what they claim, what they hide, what an interruption costs.

Statistical tests have a false-alarm rate of 1e-6 each.
"""

import json
import re
import sqlite3
from contextlib import closing

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import NOT_DECIDED
from fedveil.privacy.ledger.file import read_charges, read_participations
from fedveil.privacy.ledger.statement import statements
from fedveil.privacy.releases.central import CentralNoise
from fedveil.privacy.releases.client_noise import ClientNoise
from fedveil.privacy.secure import DIAGNOSTICS, SECURE
from fedveil.runs.run import Run
from fedveil.training.engines.serial import Serial
from fedveil.training.round import RoundResult

from .conftest import BASE

SECURE_NOISE = "noise.source=secure"
PRIVATE = ("clients", "clipped", "snr", "refused", "seconds")
FALSE_ALARM = 1e-6

KINDS = {
    "central, poisson": ("central", ()),
    "central, fixed": ("central", ("sample.kind=fixed", "sample.size=8")),
    "central, everyone": ("central", ("sample.kind=all",)),
    "central, quantile": (
        "central",
        ("clip.kind=quantile", "clip.value=0.1", "clip.bit_noise=20.0"),
    ),
    "dp-sgd": ("dp-sgd", ()),
    "sites": ("sites", ()),
    "sites, whole": ("sites", ("noise.share=whole",)),
    "priv-unit": ("priv-unit", ()),
    "ldp-sgd": ("ldp-sgd", ()),
    "dp-fedavg, Laplace": ("dp-fedavg", ("data.statistics=held-out",)),
    "dp-fedavg, Gaussian": ("dp-fedavg-gaussian", ("data.statistics=public",)),
    "ldp-fl": ("ldp-fl", ("noise.epsilon=0.01",)),
    "ldp-fl, unshuffled": ("ldp-fl", ("noise.epsilon=0.01", "shuffle=none")),
}


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def model_of(folder):
    return (folder / "model.safetensors").read_bytes()


class Crash(Exception):
    """The process dies."""


def crash_in(monkeypatch, round):
    """Once, when the round was charged and before it is computed."""
    whole = Serial.run

    def dying(self, asked):
        if asked.number == round:
            monkeypatch.setattr(Serial, "run", whole)
            raise Crash
        return whole(self, asked)

    monkeypatch.setattr(Serial, "run", dying)


# --- claims ---


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_says_that_its_noise_is_secure(start, kind):
    recipe, settings = KINDS[kind]
    run = start(recipe, *settings, SECURE_NOISE)
    result = run.execute()
    assert result["rounds"] == 4
    assert result["claims"]
    for claim in result["claims"]:
        assert claim["noise"] == "secure"
        assert SECURE in claim["assumptions"]
        assert not any("seed" in assumption for assumption in claim["assumptions"])
        assert claim["delta"] > 0
    (told,) = statements(run.folder / "ledger.db")
    assert [claim.to_dict() for claim in told.claims] == result["claims"]


REFUSED = {
    "as published": (
        "dp-fedavg",
        ("budget.as_published=true", "noise.multiplier=none", "budget.epsilon=9.0"),
        "budget.as_published is for simulations",
    ),
    "checkpoints now and then": ("central", ("engine.checkpoint=2",), "engine.checkpoint is 2"),
    "no claim": ("weak-dp", (), "no use with noise.claim = false"),
    "an epsilon that is too large": ("ldp-fl", (), "cannot be vouched for"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_secure_noise_does_not_do_is_told_in_one_line(cli, tmp_path, what):
    recipe, settings, told = REFUSED[what]
    base = BASE.get(recipe, ("rounds=4", "data.clients=20", "client.epochs=1", "sample.size=10"))
    sets = [part for s in (*base, *settings, SECURE_NOISE) for part in ("--set", s)]
    code, _, err = cli("run", recipe, *sets, "--out", tmp_path / "out", "--quiet")
    assert code == 2
    (line,) = err.splitlines()
    assert told in line
    assert not (tmp_path / "out").exists()


# --- diagnostics ---


def sets(recipe, *more):
    return [part for s in (*BASE[recipe], SECURE_NOISE, *more) for part in ("--set", s)]


@pytest.mark.parametrize("recipe", ["central", "ldp-sgd"])
def test_diagnostics_are_nowhere_unless_asked_for(cli, tmp_path, recipe):
    out = tmp_path / "out"
    code, screen, progress = cli("run", recipe, *sets(recipe), "--out", out)
    assert code == 0
    for line in metrics_of(out)[1:]:
        assert [line[name] for name in PRIVATE] == [None] * len(PRIVATE)
        assert line["loss"] > 0
    result = json.loads((out / "result.json").read_text())
    assert result["refused"] == {}
    assert result["timing"]["client_updates_per_second"] is None
    for claim in result["claims"]:
        assert DIAGNOSTICS not in claim["assumptions"]
    first, *lines = progress.splitlines()
    assert "over 20 clients" in first
    rounds = [line for line in lines if line.startswith("round ")]
    measures = [f"accuracy {line['accuracy']:.3f}" for line in metrics_of(out)[1:]]
    assert len(rounds) == len(measures) == 4
    for number, (line, measure) in enumerate(zip(rounds, measures, strict=True), 1):
        assert re.fullmatch(rf"round {number}/4  {measure}  epsilon [\d.]+", line)
    for word in ("signal/noise", "clipped", "updates/s", "s left"):
        assert word not in progress + screen
    assert "updates were clipped" not in screen


def test_diagnostics_that_were_asked_for_are_named_in_the_claim(cli, tmp_path):
    out = tmp_path / "out"
    code, screen, progress = cli(
        "run", "central", *sets("central", "evaluate.diagnostics=true"), "--out", out
    )
    assert code == 0
    for line in metrics_of(out)[1:]:
        assert all(line[name] is not None for name in PRIVATE)
    result = json.loads((out / "result.json").read_text())
    assert result["timing"]["client_updates_per_second"] > 0
    assert all(DIAGNOSTICS in claim["assumptions"] for claim in result["claims"])
    assert re.search(r"^round 4/4 .*  clipped \d+ %$", progress, re.MULTILINE)
    assert "outside this claim" in " ".join(screen.split())


def test_clients_whose_reports_were_refused_are_not_named(start, monkeypatch):
    """That a client diverged says something about its records."""
    numbers = RoundResult.numbers
    seen = []

    def spy(self, **options):
        object.__setattr__(self, "refused", (3, 5))
        seen.append(self.refused)
        return numbers(self, **options)

    monkeypatch.setattr(RoundResult, "numbers", spy)
    secure = start("central", SECURE_NOISE, out="secure")
    assert secure.execute()["refused"] == {}
    shown = start("central", SECURE_NOISE, "evaluate.diagnostics=true", out="shown").execute()
    assert shown["refused"] == {"3": 4, "5": 4}
    assert len(seen) == 8


def test_a_seeded_run_shows_diagnostics_unless_told_not_to(start):
    run = start("central", out="shown")
    run.execute()
    assert all(line["clients"] is not None for line in metrics_of(run.folder)[1:])
    run = start("central", "evaluate.diagnostics=false", out="hidden")
    run.execute()
    assert all(line["clients"] is None for line in metrics_of(run.folder)[1:])


@pytest.mark.parametrize("settings", [(), ("sample.kind=fixed", "sample.size=8")])
def test_a_secret_cohort_is_stored_nowhere(start, monkeypatch, settings):
    """Neither in a table of the ledger nor as anything that changes with it."""
    cohorts, whole = [], Serial.run

    def spy(self, round):
        cohorts.append(round.ids.copy())
        return whole(self, round)

    monkeypatch.setattr(Serial, "run", spy)
    run = start("central", *settings, SECURE_NOISE)
    run.execute()
    with closing(sqlite3.connect(run.folder / "ledger.db")) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE sql > ''")]
        assert set(tables) == {"about", "runs", "charges", "cohorts", "closings"}
        assert db.execute("SELECT COUNT(*) FROM cohorts").fetchone() == (0,)
        charges = db.execute("SELECT covers, event FROM charges").fetchall()
    assert len(set(charges)) == 1
    assert len(cohorts) == 4
    contents = [path.read_bytes() for path in run.folder.rglob("*") if path.is_file()]
    for ids in cohorts:
        for stored in (ids.astype("<u4").tobytes(), ids.tobytes(), str(ids.tolist()).encode()):
            assert not any(stored in content for content in contents)


# --- repeating ---


QUICK = ("central, poisson", "ldp-fl")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in QUICK else pytest.mark.slow) for k in KINDS]
)
def test_two_secure_runs_of_one_seed_differ_and_two_seeded_ones_do_not(start, kind):
    recipe, settings = KINDS[kind]
    settings = (*settings, "engine.mode=looped")  # the faster one may differ from run to run
    for source, alike in ((SECURE_NOISE, False), ("noise.source=seeded", True)):
        pair = [start(recipe, *settings, source, out=f"{alike} {k}") for k in range(2)]
        for run in pair:
            run.execute()
        assert (model_of(pair[0].folder) == model_of(pair[1].folder)) is alike


def test_the_seed_does_not_draw_a_secret_cohort(start):
    plans = [start("central", SECURE_NOISE, out=f"{k}").training for k in range(2)]
    drawn = [
        [plan.plan.sampler.cohort(20, n, plan.streams).tolist() for n in range(1, 9)]
        for plan in plans
    ]
    assert drawn[0] != drawn[1]


# --- interruptions ---


def test_an_interrupted_round_is_a_new_attempt_with_a_charge_of_its_own(start, monkeypatch):
    whole = start("central", SECURE_NOISE, "rounds=6", out="whole").training.plan
    room = sum(whole.lines[0].claims(n)[0].epsilon for n in (6, 7)) / 2
    run = start("central", SECURE_NOISE, "rounds=6", f"budget.epsilon={room}")
    crash_in(monkeypatch, 3)
    with pytest.raises(Crash):
        run.execute()
    assert [c.round for c in read_charges(run.folder / "ledger.db")] == [1, 2, 3]
    resumed = Run.resume(run.folder, None)
    result = resumed.execute()
    charges = read_charges(run.folder / "ledger.db")
    assert [(c.round, c.attempt) for c in charges] == [
        (1, 0),
        (2, 0),
        (3, 0),
        (3, 1),
        (4, 0),
        (5, 0),
    ]
    assert (result["rounds"], result["stopped"]) == (5, "budget")
    line = run.training.plan.lines[0]
    assert result["claims"][0]["epsilon"] == line.epsilon_if_ended(6, 6, extra_attempts=1) == room
    assert result["claims"][-1]["epsilon"] == line.claims(6)[0].epsilon
    (told,) = statements(run.folder / "ledger.db")
    assert [claim.to_dict() for claim in told.claims] == result["claims"]
    assert metrics_of(run.folder)[-1]["epsilon"] >= result["claims"][-1]["epsilon"] - 1e-3


@pytest.mark.parametrize("epsilon", ["500.0", "inf"])
def test_an_attempt_that_the_budget_has_room_for_costs_no_round(start, monkeypatch, epsilon):
    run = start("central", SECURE_NOISE, f"budget.epsilon={epsilon}")
    crash_in(monkeypatch, 3)
    with pytest.raises(Crash):
        run.execute()
    result = Run.resume(run.folder, None).execute()
    assert (result["rounds"], result["stopped"]) == (4, "rounds")
    line = run.training.plan.lines[0]
    assert result["claims"][0]["epsilon"] == line.epsilon_if_ended(5, 4, extra_attempts=1)
    assert result["claims"][-1]["epsilon"] == line.claims(5)[0].epsilon
    assert result["claims"][-1]["condition"] == NOT_DECIDED
    assert metrics_of(run.folder)[-1]["epsilon"] >= result["claims"][-1]["epsilon"] - 1e-3


def test_everyone_asked_is_charged_for_an_interrupted_round(start, monkeypatch):
    run = start("ldp-sgd", SECURE_NOISE, "sample.max_participations=8")
    crash_in(monkeypatch, 2)
    with pytest.raises(Crash):
        run.execute()
    before = read_participations(run.folder / "ledger.db")
    assert before.sum() == 20
    result = Run.resume(run.folder, None).execute()
    counts = read_participations(run.folder / "ledger.db")
    assert counts.sum() == 10 * len(read_charges(run.folder / "ledger.db"))
    assert (counts >= before).all()
    plan = run.training.plan
    worst = int(counts.max())
    assert result["claims"][0]["epsilon"] == plan.lines[0].epsilon_if_ended(
        worst, 4, extra_attempts=1
    )
    assert result["claims"][-1]["epsilon"] == plan.lines[0].claims(worst)[0].epsilon


def test_a_lost_checkpoint_costs_its_round_again(start):
    """Rounds 2 and 3 are done anew from round 1: each is a second release to those asked."""

    def crash(line):
        if line["round"] == 3:
            run._finish = lambda *_: {}
            raise Crash

    run = start("ldp-sgd", SECURE_NOISE, "rounds=6", "sample.max_participations=8")
    with pytest.raises(Crash):
        run.execute(crash)
    (run.folder / "checkpoint" / "round-00000003.safetensors").write_bytes(b"")
    result = Run.resume(run.folder, None).execute()
    assert any("round-00000003" in note for note in result["notes"])
    charges = [(c.round, c.attempt) for c in read_charges(run.folder / "ledger.db")]
    assert charges[:5] == [(1, 0), (2, 0), (3, 0), (3, 1), (4, 0)]
    with closing(sqlite3.connect(run.folder / "ledger.db")) as db:
        stored = [ids for (ids,) in db.execute("SELECT ids FROM cohorts")]
    counts = np.bincount(np.concatenate([np.frombuffer(i, "<u4") for i in stored]), minlength=20)
    assert read_participations(run.folder / "ledger.db").tolist() == counts.tolist()
    told = [c for c in result["claims"] if c["holds_for"] != "the median client"]
    line, worst = run.training.plan.lines[0], int(counts.max())
    assert told[0]["epsilon"] == line.epsilon_if_ended(worst, 6, extra_attempts=1)
    assert told[-1]["epsilon"] == line.claims(worst)[0].epsilon


def test_a_run_cannot_change_its_noise_source(start):
    run = start("central", "engine.mode=looped")
    run.execute()
    path = run.folder / "recipe.toml"
    path.write_text(path.read_text().replace('"seeded"', '"secure"'))
    with pytest.raises(BadInput, match="in the ledger and"):
        Run.resume(run.folder, None).execute()


# --- the noise itself ---


def test_the_servers_sum_carries_the_noise_that_is_claimed(start, monkeypatch):
    """The sum after noise less the sum before it, over all weights and rounds: chi-squared."""
    sums, release = [], CentralNoise.noise_

    def spy(self, total, round):
        before = total.clone()
        release(self, total, round)
        sums.append((total - before, self.scale(round.clip)))

    monkeypatch.setattr(CentralNoise, "noise_", spy)
    run = start("central", SECURE_NOISE, "rounds=8")
    run.execute()
    scaled = torch.cat([noise / scale for noise, scale in sums])
    low, high = chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], len(scaled))
    assert low < float((scaled**2).sum()) < high
    assert len(sums) == 8


def test_reports_of_clients_carry_the_noise_that_is_claimed(start, monkeypatch):
    reports, randomise = [], ClientNoise.randomise_

    def spy(self, rows, asked):
        before = rows.clone()
        randomise(self, rows, asked)
        scales = torch.from_numpy(self.scales(asked.clip, asked.ids))[:, None]
        reports.append((rows.double() - before.double()) / scales)

    monkeypatch.setattr(ClientNoise, "randomise_", spy)
    start("ldp-sgd", SECURE_NOISE).execute()
    rows = torch.cat(reports)
    assert len(rows) == 40
    low, high = chi2.ppf([FALSE_ALARM / 80, 1 - FALSE_ALARM / 80], rows.shape[1])
    squares = (rows**2).sum(dim=1)
    assert bool(((squares > low) & (squares < high)).all())
