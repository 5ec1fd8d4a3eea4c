"""Runs whose metrics have a price: charged, resumed, drawn with their intervals, or refused."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.console import print_result
from fedveil.privacy.accounting.claims import HELD_OUT
from fedveil.privacy.ledger.statement import statements
from fedveil.runs.opened_run import measure_run
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from fedveil.training.gate import Gate

from .endings import Crash, crash_after, metrics_of, model_of, one_line, stop_after

CLIENTS, RECORDS = 60, 4
COLUMNS = {"age": {"low": -4.0, "high": 4.0}, "dose": {"low": -4.0, "high": 4.0}}
HOLDING_OUT = ("data.test=by-client",)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """60 sites of four rows; who is well is decided by age."""
    random, path = np.random.default_rng(0), tmp_path_factory.mktemp("table") / "t.csv"
    lines = ["site,age,dose,well"]
    for k in range(CLIENTS * RECORDS):
        age, dose = random.normal(size=2)
        lines.append(f"s{k // RECORDS},{age:.6f},{dose:.6f},{'yes' if age > 0 else 'no'}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def settings(table):
    def made(*more, source="seeded"):
        declared = [f"data.columns.{c}.{k}={v}" for c, d in COLUMNS.items() for k, v in d.items()]
        return [
            *(f"data.path={table}", "data.client=site", "data.target=well"),
            *(*declared, "data.columns.well.values=['no','yes']"),
            *("model.name=softmax", "rounds=6", "client.epochs=1", "client.lr=0.5"),
            *("budget.epsilon=6.0", "budget.delta=1e-3", "evaluate.epsilon=2.0"),
            *("engine.workers=1", f"noise.source={source}", *more),
        ]

    return made


@pytest.fixture
def start(settings, tmp_path):
    def started(*more, source="seeded", out="run", recipe="central"):
        chosen = load_recipe(recipe, settings(*more, source=source))
        return Run.start(chosen, tmp_path / out, None)

    return started


def charges(folder):
    (told,) = statements(folder / "ledger.db")
    return [(c.round, c.attempt) for c in told.charges if c.covers[:7] == "metrics"]


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_held_out_owners_have_a_claim_of_their_own(start, source):
    run = start(*HOLDING_OUT, source=source)
    result = run.execute()
    assert [line["round"] for line in metrics_of(run.folder) if "loss" in line] == [2, 3, 5, 6]
    assert charges(run.folder) == [(2, 0), (3, 0), (5, 0), (6, 0)]
    own = [claim for claim in result["claims"] if claim["covers"] == HELD_OUT]
    assert own[0]["epsilon"] <= 2.0
    assert result["claims"][0]["covers"] == "updates"
    assert result["claims"][0]["epsilon"] > 5.9  # the training's own budget, untouched
    (told,) = statements(run.folder / "ledger.db")
    assert [claim.to_dict() for claim in told.claims] == result["claims"]
    assert result["metrics"].keys() == result["intervals"].keys() == {"accuracy", "loss"}
    assert result["measured_after"] == 6
    last = metrics_of(run.folder)[-1]
    assert last["accuracy"] == result["metrics"]["accuracy"]
    assert last["accuracy/interval"] == result["intervals"]["accuracy"]


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_on_clients_the_claim_that_counts_covers_both(start, source):
    run = start(source=source)
    result = run.execute()
    first = result["claims"][0]
    assert (first["covers"], first["noise"]) == ("updates and metrics", source)
    assert 5.9 < first["epsilon"] <= 6.0
    assert charges(run.folder) == [(2, 0), (3, 0), (5, 0), (6, 0)]
    alone = start("evaluate.epsilon=none", out="alone")
    multipliers = [each.training.plan.release.multiplier for each in (run, alone)]
    assert multipliers[0] > multipliers[1]


def test_measuring_the_run_again_does_not_undo_the_price(start):
    run = start(*HOLDING_OUT)
    run.execute()
    with pytest.raises(BadInput, match=r"have a price \(evaluate\.epsilon\)"):
        measure_run(fv.open_run(run.folder), None)
    none = start("evaluate.epsilon=none", out="none")
    none.execute()
    with pytest.raises(BadInput, match="needs test records and the data have none"):
        measure_run(fv.open_run(none.folder), None)
    share = start("evaluate.epsilon=none", "data.test=0.25", out="share")
    share.execute()
    assert measure_run(fv.open_run(share.folder), None)["loss"] > 0  # a simulation, which says so


def test_rows_of_nobody_known_are_paid_for_one_by_one(settings, tmp_path):
    """Without a client column nobody knows which held-out rows are one person's."""
    chosen = load_recipe("central", settings("data.client=none", "data.clients=20", "data.test=0.2",
                                             'data.features=["age", "dose"]'))  # fmt: skip
    run = Run.start(chosen, tmp_path / "run", None)
    tested = len(run.training.data.test_y)
    assert run.training.plan.metrics.owners == tested
    assert 20 < tested < 90  # of 240
    (own,) = [c for c in run.training.plan.claims(6) if c.covers == HELD_OUT][:1]
    assert own.unit is fv.claims.Unit.RECORD


def test_round_zero_is_not_measured_and_nothing_else_is_written_of_metrics(start):
    run = start(*HOLDING_OUT)
    run.execute()
    first, *rest = metrics_of(run.folder)
    assert first.keys() == {"round", "epsilon", "claim"}
    measured = {"accuracy", "loss", "accuracy/interval", "loss/interval"}
    base = {"round", "clients", "clipped", "snr", "refused", "clip", "epsilon", "claim", "seconds"}
    assert all(line.keys() - measured == base for line in rest)
    assert all(line.keys() & measured in (set(), measured) for line in rest)


def test_how_wide_intervals_will_be_is_said_before_the_first_round(start):
    run, told = start(*HOLDING_OUT), []
    run.execute(on_start=lambda: told.append(run.describe()))
    (line,) = told
    assert re.search(
        r"accuracy, loss measured on \d+ held-out owners after rounds 2, 3, 5, 6", line
    )
    assert "epsilon 2 at delta 0.001 per client (zero-out, central trust)" in line
    width = 100 * run.training.plan.metrics.intervals["accuracy"]
    assert f"accuracy +-{width:.3g} points" in line
    assert f"accuracy will be within +-{width:.3g} points only" in line
    assert any("points only" in note for note in run.result["notes"])


def test_a_seeded_run_that_is_resumed_ends_where_it_would_have(start):
    whole, cut = start(*HOLDING_OUT), start(*HOLDING_OUT, out="cut")
    whole.execute()
    with pytest.raises(Crash):
        cut.execute(crash_after(cut, 3))
    Run.resume(cut.folder, None).execute()

    def numbers(folder):
        return [{**line, "seconds": 0} for line in metrics_of(folder)]

    assert numbers(whole.folder) == numbers(cut.folder)
    assert model_of(whole.folder) == model_of(cut.folder)
    assert charges(cut.folder) == [(2, 0), (3, 0), (5, 0), (6, 0)]


def test_a_secure_measurement_that_was_lost_is_charged_again_and_the_budget_holds(
    start, monkeypatch
):
    """Killed after round 3 was measured and before it was written: the last is then not made."""
    run, whole = start(*HOLDING_OUT, source="secure"), Gate.result

    def dying(self, result):
        if result.round == 3:
            monkeypatch.setattr(Gate, "result", whole)
            run._finish = lambda *_: {}
            raise Crash
        return whole(self, result)

    monkeypatch.setattr(Gate, "result", dying)
    with pytest.raises(Crash):
        run.execute()
    resumed = Run.resume(run.folder, None)
    result = resumed.execute()
    assert charges(run.folder) == [(2, 0), (3, 0), (3, 1), (5, 0)]
    assert [line["round"] for line in metrics_of(run.folder) if "loss" in line] == [2, 3, 5]
    own = [claim for claim in result["claims"] if claim["covers"] == HELD_OUT]
    assert own[0]["epsilon"] <= 2.0
    assert result["measured_after"] == 5


def test_a_run_that_was_stopped_says_when_it_was_measured_last(start):
    run = start(*HOLDING_OUT)
    result = run.execute(stop_after(4))
    assert (result["rounds"], result["measured_after"]) == (4, 3)
    assert result["metrics"]["loss"] == metrics_of(run.folder)[3]["loss"]
    text = io.StringIO()
    print_result(Console(file=text, width=200), result)
    assert "after round 3" in text.getvalue()
    assert f"± {result['intervals']['accuracy']:.4f}" in text.getvalue()


def test_a_run_that_was_never_measured_says_nothing(start):
    result = start(*HOLDING_OUT).execute(stop_after(1))
    assert (result["metrics"], result["measured_after"]) == ({}, None)


def test_how_often_is_asked_for(start):
    run = start(*HOLDING_OUT, "evaluate.every=4", "evaluate.delta=1e-4", "evaluate.loss_clip=3.0")
    metrics = run.training.plan.metrics
    assert (metrics.rounds, metrics.loss_clip, metrics.line.budget.delta) == ((4, 6), 3.0, 1e-4)


def test_the_loss_is_clipped_to_twice_that_of_a_guess(start):
    assert start(*HOLDING_OUT).training.plan.metrics.loss_clip == pytest.approx(2 * np.log(2))


def test_what_was_resolved_has_the_same_noise_again(start):
    run = start(source="secure")
    run.execute(stop_after(1))
    again = Run.resume(run.folder, None)
    assert again.training.plan.lines == run.training.plan.lines
    assert again.training.plan.metrics == run.training.plan.metrics


REFUSED = {
    "public test records": (
        "central",
        ("data.path=none", "data.name=digits", "data.clients=20"),
        "the test records are public",
    ),
    "a metric that is no mean": (
        "central",
        (*HOLDING_OUT, "evaluate.metrics=['auroc']"),
        "metric 'auroc' is not one",
    ),
    "clients who trust nobody": ("ldp-sgd", (), "hold owners out"),
    "nothing claimed": ("fedavg", (), "nothing is claimed of the training"),
    "delta alone": (
        "central",
        (*HOLDING_OUT, "evaluate.epsilon=none", "evaluate.delta=1e-4"),
        "evaluate.delta has no effect",
    ),
    "loss_clip alone": (
        "central",
        (*HOLDING_OUT, "evaluate.epsilon=none", "evaluate.loss_clip=1.0"),
        "evaluate.loss_clip has no effect",
    ),
    "a delta that publishes somebody": (
        "central",
        (*HOLDING_OUT, "evaluate.delta=0.2"),
        "evaluate.delta is 0.2",
    ),
    "no epsilon": ("central", (*HOLDING_OUT, "evaluate.epsilon=0"), "evaluate.epsilon is 0"),
    "infinite": ("central", (*HOLDING_OUT, "evaluate.epsilon=inf"), "evaluate.epsilon is inf"),
    "more than the budget": ("central", ("evaluate.epsilon=7.0",), "leaves nothing of"),
    "a fixed cohort": (
        "central",
        ("sample.kind=fixed", "sample.size=8"),
        "no accountant knows that beside",
    ),
    "clients in the clear": (
        "central",
        ("evaluate.clients=true",),
        "would measure in the clear the clients",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_in_one_line(settings, tmp_path, what):
    recipe, more, told = REFUSED[what]
    base = settings()
    if recipe != "central":
        base = [s for s in base if not s.startswith(("client.", "noise.source"))]
    if recipe == "fedavg":
        base = [s for s in base if not s.startswith("budget.")]
    if recipe == "ldp-sgd":
        base += ["sample.size=10", "sample.max_participations=6"]
    if what == "public test records":
        base = [s for s in base if not s.startswith("data.")]
        more = [s for s in more if s != "data.path=none"]
    with pytest.raises(BadInput) as refusal:
        Run.start(load_recipe(recipe, [*base, *more]), tmp_path / "out", None)
    assert told in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_a_ledger_that_runs_share_refuses_them(settings, tmp_path, cli):
    sets = [part for s in settings(*HOLDING_OUT) for part in ("--set", s)]
    outcome = cli("run", "central", *sets, "--ledger", tmp_path / "shared.db", "--quiet")
    assert "evaluate.epsilon" in one_line(outcome)


def test_a_sweep_refuses_them(settings, tmp_path, cli):
    sets = [part for s in settings(*HOLDING_OUT) for part in ("--set", s)]
    axis = ("--grid", "clip.value=0.5,1.0", "--out", tmp_path / "swept")
    assert "evaluate.epsilon" in one_line(cli("sweep", "central", *sets, *axis))


def test_numbers_to_predict_need_a_clip_of_the_loss(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    clients = [(str(k), x[2 * k : 2 * k + 2], x[2 * k : 2 * k + 2, 0]) for k in range(20)]
    data = fv.FederatedData.from_clients(clients, classes=0)
    sets = {
        "rounds": 2,
        "budget.epsilon": 6.0,
        "budget.delta": 1e-3,
        "evaluate.epsilon": 2.0,
        "model.name": "linear",
    }
    with pytest.raises(BadInput, match=r"evaluate\.loss_clip is missing"):
        fv.run("central", data=data, out=tmp_path / "a", set=sets, quiet=True)
    run = fv.run(
        *("central",), data=data, out=tmp_path / "b", set={**sets, "evaluate.loss_clip": 4.0}
    )
    assert run.result["metrics"].keys() == {"loss"}


def test_a_result_is_plain_json(start):
    run = start(*HOLDING_OUT)
    run.execute()
    told = json.loads((run.folder / "result.json").read_text())
    assert told["intervals"] == run.result["intervals"]


@pytest.mark.parametrize("more", [HOLDING_OUT, ()])
def test_the_share_of_the_commonest_label_would_be_a_number_of_the_same_owners(start, more):
    run = start(*more)
    assert run.training.gate.commonest_share() is None
    assert not any("commonest" in note for note in run.execute()["notes"])


def test_balanced_accuracy_has_no_price(start):
    with pytest.raises(BadInput, match="metric 'balanced-accuracy' is not one: omit it"):
        start(*HOLDING_OUT, "evaluate.metrics=['balanced-accuracy']")
