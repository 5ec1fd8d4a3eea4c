"""What is computed of clients' records in the clear: claims say it, and secure noise refuses it."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedveil.base.errors import BadInput
from fedveil.data.load import load_records
from fedveil.data.provenance import holdout
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from fedveil.tuning.recipe_grid import cells
from fedveil.tuning.trials import Laboratory

LOANS = 1000
CLIP = 1.0
FITTED = (
    "means, standard deviations, categories and principal components of the features were fitted "
    "on clients' records in the clear: outside this claim"
)
LENDING = ["data.name=lending-club", "model.name=linear", "data.clients=100", "client.lr=0.05",
           "engine.mode=looped", "engine.workers=1", "data.seed=1"]  # fmt: skip
DIABETES = ["data.name=diabetes", "model.name=linear", "data.clients=20", "client.lr=0.05",
            "rounds=1", "engine.workers=1"]  # fmt: skip
GIVEN = ["noise.multiplier=2.0", "budget.epsilon=inf"]  # calibrating takes a second


def loans(folder, income=0.0):
    """Loans whose rate follows from ten columns; `income` is added to one loan of a client."""
    random = np.random.default_rng(3)
    values = random.lognormal(size=(LOANS, 11))
    values[holdout(LOANS)[0][0], 0] += income
    rate = 10 + values[:, 1:4].sum(axis=1)
    table = {"int_rate": rate, **{f"column_{i}": values[:, i] for i in range(11)}}
    (folder / "lending_club").mkdir(parents=True)
    pq.write_table(pa.table(table), folder / "lending_club/lending_club_loans.parquet")
    return folder


def changed(tmp_path, *settings):
    """Two trainings whose records differ in the income of one loan, and what moved."""
    recipe = load_recipe("central", [*LENDING, *settings])
    roots = [loans(tmp_path / "before"), loans(tmp_path / "after", 1e4)]
    before, after = (build(recipe, root) for root in roots)
    moved = (before.data.x != after.data.x).any(axis=1)
    clients = np.searchsorted(before.data.offsets, np.flatnonzero(moved), side="right") - 1
    totals = []
    for training in (before, after):
        totals.append(
            training.engine.run(training.round(1, np.arange(100), training.start())).total.clone()
        )
    return before, len(np.unique(clients)), float((totals[0] - totals[1]).norm())


def test_one_income_moves_all_clients_and_the_sum_so_every_claim_says_it(tmp_path):
    training, clients, distance = changed(tmp_path)
    assert clients == 100
    assert distance > 2 * CLIP
    claims = training.plan.claims(training.plan.permitted)
    assert claims[0].epsilon == pytest.approx(7.998, abs=0.005)
    assert all(FITTED in claim.assumptions for claim in claims)


@pytest.mark.slow
def test_fitted_on_the_test_split_one_income_moves_its_own_client(tmp_path):
    training, clients, distance = changed(tmp_path, "data.statistics=held-out", *GIVEN)
    assert clients == 1
    assert distance <= 2 * CLIP
    for line in training.plan.lines:
        assert FITTED not in line.assumptions
        assert any("fitted on the test records, which no" in text for text in line.assumptions)


@pytest.mark.parametrize("recipe", ["dp-fedavg", "central", "dp-sgd"])
def test_every_line_of_a_plan_says_what_was_fitted(recipe):
    published = ["budget.as_published=true"] if recipe == "dp-fedavg" else []
    settings = [*DIABETES[:2], "data.clients=100", *published]
    training = build(load_recipe(recipe, settings))
    assert training.plan.lines
    for line in training.plan.lines:
        assert any(text.startswith("means and standard dev") for text in line.assumptions)


def test_without_a_claim_nothing_is_said():
    assert build(load_recipe("fedavg", [*DIABETES, "sample.kind=all"])).plan.lines == ()


def test_secure_noise_refuses_statistics_that_are_not_public(tmp_path):
    secure = [*DIABETES, *GIVEN, "noise.source=secure"]
    with pytest.raises(BadInput, match=r"'secure' and means and .* \(data.statistics = 'held-out'"):
        build(load_recipe("central", secure))
    public = build(load_recipe("central", [*secure, "data.statistics=public"]))
    said = "declared public: means and standard deviations of the features"
    assert all(said in line.assumptions for line in public.plan.lines)
    held = build(load_recipe("central", [*secure, "data.statistics=held-out"]))
    assert not any("declared" in text for line in held.plan.lines for text in line.assumptions)


@pytest.mark.slow
def test_a_run_writes_what_was_fitted_and_goes_on_with_it(tmp_path):
    Run.start(load_recipe("central", DIABETES), tmp_path / "run", None).execute(lambda line: None)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    for claim in result["claims"]:
        assert any("in the clear: outside this claim" in text for text in claim["assumptions"])
    Run.resume(tmp_path / "run", None)


@pytest.mark.parametrize("how", ["public", "held-out"])
def test_statistics_of_data_that_fit_nothing(how):
    with pytest.raises(BadInput, match=rf"data.statistics is '{how}' and nothing of digits was"):
        load_recipe("central", [f"data.statistics={how}"]).load_data()


def test_statistics_of_saved_data(tmp_path):
    fitted = load_recipe("central", DIABETES).load_data()
    fitted.save(tmp_path / "fitted")
    replace(fitted, fitted="").save(tmp_path / "plain")

    def opened(name, *settings):
        path = f"data.path={tmp_path / name}"
        none = ["data.clients=none", "data.partition=none", "data.alpha=none"]
        return load_recipe("central", ["data.name=saved", path, *none, *settings]).load_data()

    assert opened("fitted").assumptions == fitted.assumptions
    assert opened("fitted", "data.statistics=public").declared_public
    with pytest.raises(BadInput, match="'held-out' and saved data are fitted: use 'public'"):
        opened("fitted", "data.statistics=held-out")
    with pytest.raises(BadInput, match="nothing of saved was fitted"):
        opened("plain", "data.statistics=public")
    with pytest.raises(BadInput, match=r"data\.test has no effect on saved data"):
        opened("plain", "data.test=by-client")


def test_repetitions_in_step_share_the_plan_that_says_it():
    laboratory = Laboratory()
    settings = [*DIABETES, "data.seed=1", "engine.mode=vectorised"]
    (cell,) = cells("dp-fedavg", [*settings, "sample.size=4"], [])
    prepared = laboratory.prepare(cell)
    assert prepared.together > 1
    assert len(laboratory.trial(prepared, [0, 1])) == 2
    assert all("in the clear" in str(claim.assumptions) for claim in prepared.shown_claims)


def test_cells_of_other_statistics_have_other_features():
    laboratory = Laboratory()
    whole, held = (
        laboratory.federated_data(load_recipe("central", [*DIABETES, *more]))
        for more in ([], ["data.statistics=held-out"])
    )
    assert whole.fitted
    assert not held.fitted
    assert not np.array_equal(whole.x, held.x)


def test_options_that_a_data_set_does_not_have():
    with pytest.raises(BadInput, match="digits has no option 'held_out'"):
        load_records("digits", held_out=True)


WRITERS = 20
FEMNIST = ["data.name=femnist", "data.partition=natural", "data.clients=none",
           "data.min_records=2", "sample.rate=0.5", "engine.workers=1", "rounds=1",
           *GIVEN]  # fmt: skip
MEASURED = "test records of the clients themselves are measured in the clear: outside this claim"


@pytest.fixture(scope="module")
def writers(tmp_path_factory):
    """Twenty writers, each with three training records and one test record of its own ink."""
    root = tmp_path_factory.mktemp("femnist")
    (root / "femnist").mkdir()
    writer = np.repeat(np.arange(WRITERS), 4)
    np.savez_compressed(
        root / "femnist/femnist_673writers.npz",
        x=np.broadcast_to(writer[:, None, None], (len(writer), 28, 28)).astype(np.uint8),
        y=np.zeros(len(writer), dtype=np.uint8),
        writer=writer.astype(np.int16),
        split=np.tile(np.array([0, 0, 0, 1], dtype=np.uint8), WRITERS),
        writer_id=np.array([f"w{k}" for k in range(WRITERS)]),
    )
    return root


def test_natural_clients_have_no_test_records(writers):
    training = build(load_recipe("central", FEMNIST), writers)
    data = training.data
    assert (data.clients, len(data.test_x)) == (18, 2 * 4)
    assert not set(data.x[:, 0, 0, 0]) & set(data.test_x[:, 0, 0, 0])
    assert MEASURED not in training.plan.lines[0].assumptions
    few = build(load_recipe("central", [*FEMNIST, "data.clients=8"]), writers).data
    np.testing.assert_array_equal(few.test_x, data.test_x)
    assert set(few.names) < set(data.names)
    with pytest.raises(BadInput, match="19 clients: femnist has 18 owners beside 2 held out"):
        build(load_recipe("central", [*FEMNIST, "data.clients=19"]), writers)


def test_the_sources_split_is_said_in_every_claim_and_refused_with_secure_noise(writers):
    own = [*FEMNIST, "data.test=records"]
    training = build(load_recipe("central", own), writers)
    assert (training.data.clients, len(training.data.test_x)) == (20, 20)
    assert all(MEASURED in line.assumptions for line in training.plan.lines)
    with pytest.raises(BadInput, match="'secure' and test records are the clients' own"):
        build(load_recipe("central", [*own, "noise.source=secure"]), writers)
    secure = build(load_recipe("central", [*FEMNIST, "noise.source=secure"]), writers)
    assert secure.plan.secure


def test_whose_records_are_tested_is_for_natural_clients():
    with pytest.raises(BadInput, match="test 'by-client' has no effect on partition 'iid'"):
        load_recipe("central", ["data.test=by-client"]).load_data()
