"""Inversion of what runs show: of baselines all, of local reports no more than the mean image."""

from dataclasses import replace

import numpy as np
import pytest

from fedveil.audit.findings import Attack
from fedveil.audit.inversion import (
    InversionAudit,
    check_images,
    mean_measure,
    pixels_of,
    side_by_side,
)
from fedveil.base.errors import BadInput
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from tests.audit.test_audit_command import left

FEW = ("engine.workers=1", "data.clients=40", "rounds=3", "engine.mode=looped")
QUICK = InversionAudit(clients=1, steps=60, restarts=1)


def leaks_of(audit, training, *on_step):
    return [leak for _, leak in audit.reconstructions(training, *on_step)]


def training(name, *settings):
    return build(load_recipe(name, (*FEW, *settings)), None)


def measures(leak):
    return {measure.name: measure.value for measure in leak.measures}


def test_a_baseline_shows_its_records():
    fedsgd = training("fedsgd", "sample.size=10")
    steps = []
    (leak,) = leaks_of(replace(QUICK, clients=2), fedsgd, lambda done, of: steps.append((done, of)))
    found = measures(leak)
    assert leak.attack == Attack.INVERSION
    assert leak.what == "an update of one record in round 1, by cosine, as the server sees it"
    assert leak.claim is None
    assert found["PSNR"] > 20 > found["PSNR of the mean image"] > 5
    assert found["SSIM"] > 0.9
    assert found["labels told"] == 1.0
    assert steps == [(1, 2), (2, 2)]


def test_several_local_steps_are_seen_through():
    fedavg = training("fedavg", "sample.size=10", "client.epochs=2")
    (leak,) = leaks_of(QUICK, fedavg)
    assert measures(leak)["PSNR"] > 18


def test_the_trusted_server_sees_what_nobody_else_does():
    trusted, others = leaks_of(QUICK, training("central", "client.epochs=1"))
    assert measures(trusted)["PSNR"] > 20
    assert measures(others)["PSNR"] < measures(others)["PSNR of the mean image"]
    assert "trusted server" in trusted.what
    assert "everybody else" in others.what
    assert trusted.claim is None  # nothing is claimed against it
    assert others.claim is not None


SLOW = pytest.param("dp-sgd", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["ldp-sgd", SLOW])
def test_what_clients_noise_is_no_better_than_the_mean_image(name):
    settings = ("budget.epsilon=8", "sample.size=10", "data.clients=20")
    (leak,) = leaks_of(replace(QUICK, steps=30), training(name, *settings))
    found = measures(leak)
    assert found["PSNR"] < found["PSNR of the mean image"]
    assert leak.claim is not None
    assert leak.claim.epsilon <= 8


@pytest.mark.slow
def test_two_valued_reports_show_nothing_behind_the_shuffler():
    before, behind = leaks_of(
        replace(QUICK, steps=30), training("ldp-fl", "shuffle.minimum=30", "client.epochs=1")
    )
    assert "before the shuffler" in before.what
    assert measures(behind)["PSNR"] < measures(behind)["PSNR of the mean image"]


def test_a_later_round_and_a_batch():
    few = replace(QUICK, records=2, round=2, steps=20)
    ((found, leak),) = few.reconstructions(training("fedsgd", "sample.size=10"))
    assert found.reconstructed.shape == found.originals.shape == (2, 1, 8, 8)
    assert leak.what.startswith("an update of 2 records in round 2")


def test_the_range_of_pixels_is_that_of_the_test_split():
    """Clients whose values lie elsewhere do not tell the attacker so."""
    fedsgd = training("fedsgd", "sample.size=10")
    elsewhere = replace(fedsgd, data=replace(fedsgd.data, x=3 * np.asarray(fedsgd.data.x)))
    assert (pixels_of(elsewhere.data).lowest, pixels_of(elsewhere.data).highest) == (0.0, 1.0)
    ((found, _),) = replace(QUICK, steps=5).reconstructions(elsewhere)
    assert found.reconstructed.max() <= 1.0 < found.originals.max()


def test_intervals_are_student_s():
    found = mean_measure("PSNR", np.array([1.0, 2.0, 3.0, 4.0]))
    assert found.value == 2.5
    assert found.high - 2.5 == pytest.approx(3.182446 * 1.290994 / 2, rel=1e-5)
    assert mean_measure("PSNR", np.array([1.0])).low is None


def test_a_run_is_left_as_it_was(tmp_path):
    recipe = load_recipe("central", (*FEW, "client.epochs=1", "evaluate.every=1000"))
    Run.start(recipe, tmp_path / "run", None).execute()
    before = left(tmp_path / "run")
    built = build(recipe, None)
    state = built.start().params.clone()
    list(leaks_of(replace(QUICK, steps=3, round=2), built))
    assert left(tmp_path / "run") == before
    assert (built.task.parameters == state).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "magic"}, "--method 'magic': use one of dlg, idlg, cosine"),
        ({"clients": 0}, "--clients is 0"),
        ({"records": 0}, "--records is 0"),
        ({"round": 0}, "--round is 0"),
        ({"steps": 0}, "--steps is 0: at least 1 is needed"),
        ({"restarts": 0}, "--restarts is 0"),
    ],
)
def test_bad_settings_get_one_line(settings, words):
    with pytest.raises(BadInput, match=words):
        InversionAudit(**settings)


def test_what_does_not_fit_the_run_gets_one_line():
    fedsgd = training("fedsgd", "sample.size=10")
    for audit, words in (
        (replace(QUICK, round=9), "--round is 9 and the plan has 3"),
        (replace(QUICK, records=500), "--records 500 and 0 clients have as many"),
    ):
        with pytest.raises(BadInput, match=words):
            list(leaks_of(audit, fedsgd))


def test_records_that_are_no_images_are_refused():
    data = training("fedsgd", "sample.size=10").data
    x, test_x = np.asarray(data.x), np.asarray(data.test_x)
    flat = replace(data, x=x.reshape(len(x), -1), test_x=test_x.reshape(len(test_x), -1))
    words = replace(data, x=x.astype(np.int64), test_x=test_x.astype(np.int64))
    named = replace(data, x={"a": x, "b": x}, test_x={"a": test_x, "b": test_x})
    number = replace(
        data, y=data.y.astype(np.float32), test_y=data.test_y.astype(np.float32), classes=0
    )
    for other, said in (
        (flat, r"of shape \(64,\)"),
        (words, "texts or whole numbers"),
        (named, "inputs a, b"),
        (number, "one label each"),
    ):
        with pytest.raises(BadInput, match=said):
            check_images(other)


@pytest.mark.slow
def test_a_picture_has_originals_and_reconstructions():
    quick = replace(QUICK, steps=2)
    central = list(quick.reconstructions(training("central", "client.epochs=1")))
    found = {leak.what: each for each, leak in central}
    one, both = side_by_side({"only": next(iter(found.values()))}), side_by_side(found)
    shown = [[at.images[0] for at in figure.axes if at.images] for figure in (one, both)]
    count = len(next(iter(found.values())).originals)
    assert [len(images) for images in shown] == [2 * count, 3 * count]
    labels = [text.get_text() for at in both.axes for text in at.texts]
    assert labels[0] == "original"
    assert all(label.endswith(" dB") for label in labels[1:])
    with pytest.raises(BadInput, match="no reconstructions"):
        side_by_side({})
    ((other, _),) = replace(quick, seed=5).reconstructions(training("fedsgd", "sample.size=10"))
    with pytest.raises(BadInput, match="different records"):
        side_by_side({"a": other, **found})
