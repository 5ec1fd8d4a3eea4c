"""Leave one unit out: what is summed before noise moves by no more than what is accounted.

Over every release, both execution modes, both sources of noise, and modules that people bring.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.base.inputs import taken
from fedveil.privacy.clip import Norm
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.secure import planned_for, with_secure_noise
from fedveil.training import work as works
from fedveil.training.gradients.modes import Mode
from tests.contracts.zoo import (
    MODULES,
    REFUSED,
    SIZES,
    contrasted,
    focal,
    records,
    shared_task,
    task,
)

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

FREE = fv.Budget(math.inf, 1e-3)
CLIENTS = len(SIZES)
SGD = fv.ClientSgd(fv.Batches(size=2, epochs=2), lr=0.5)
STEPS = fv.ClientSgd(fv.Batches(0, steps=3), lr=0.3)


def locally(schedule, laplace=False):
    return fv.client_noise(
        fv.samplers.Everyone(),
        CLIENTS,
        schedule,
        laplace=laplace,
        rounds=3,
        budgets=(FREE,),
        multiplier=2.0,
    )


def centrally(schedule, sampler=None):
    return fv.central(
        sampler or fv.samplers.Poisson(0.5),
        CLIENTS,
        schedule,
        rounds=3,
        budget=FREE,
        multiplier=2.0,
    )


RELEASES = {
    "central": lambda: (centrally(fv.clips.Fixed(0.1)), SGD),
    "central, decaying": lambda: (centrally(fv.clips.Poly(0.1, 1.0, 3, 0.01)), SGD),
    "central, quantile": lambda: (centrally(fv.clips.Quantile(0.1, 0.5, noise=5.0)), SGD),
    "central, fixed cohort": lambda: (
        centrally(fv.clips.Fixed(0.1), fv.samplers.FixedSize(3)),
        STEPS,
    ),
    "central, full batches": lambda: (centrally(fv.clips.Fixed(0.1)), STEPS),
    "central, one gradient": lambda: (centrally(fv.clips.Fixed(0.1)), fv.work.OneGradient()),
    "gaussian": lambda: (locally(fv.clips.Fixed(0.1)), fv.work.OneGradient()),
    "laplace": lambda: (locally(fv.clips.Fixed(0.1, Norm.L1), laplace=True), SGD),
    "laplace, per gradient": lambda: (
        locally(fv.clips.PerGradient(fv.clips.Fixed(0.1, Norm.L1), STEPS.reach), laplace=True),
        STEPS,
    ),
    "gaussian, per gradient": lambda: (
        locally(fv.clips.PerGradient(fv.clips.Fixed(0.1), STEPS.reach)),
        STEPS,
    ),
}


def trained(release, module, loss=fv.cross_entropy, mode=None, secure=False):
    make, tokens = MODULES[module]
    made, (plan, work) = shared_task(make, loss), RELEASES[release]()
    if secure:
        lines = tuple(replace(line, budget=planned_for(line.budget)) for line in plan.lines)
        plan = with_secure_noise(replace(plan, lines=lines), made.size, diagnostics=True)
    return fv.Training(made, records(tokens), plan, work, mode=mode, workers=1)


def summed(training, ids, round=2):
    """The sum of a round before any noise, and what one client may move it by."""
    state = training.start()
    done = training.engine.run(
        training.round(round, np.array(ids), replace(state, round=round - 1))
    )
    clip = training.plan.clip(state.adaptive_state, round)
    return (done.total if done.signal is None else done.signal).clone(), clip


def assert_bounded(training):
    everyone = list(range(CLIENTS))
    total, clip = summed(training, everyone)
    for k in everyone:
        moved = total - summed(training, [c for c in everyone if c != k])[0]
        length = float(moved.norm(p=1 if clip.norm is Norm.L1 else 2))
        assert length <= clip.value * (1 + 1e-5), f"client {k} moves the sum by {length}"


def whole_grid():
    for release in RELEASES:
        for module in MODULES:
            for mode in (None, Mode.LOOPED):
                yield release, module, mode


LONG = {
    *("attention", "attention dropout", "gru", "lstm", "lstm dropout"),
    *("named inputs", "next words", "residual", "transformer"),
}
"""Modules that take long to capture and have one like them among the others: for the slow part."""


def marked(modules):
    """Modules as parameters of a test, of which the quick part leaves out those of `LONG`."""
    return [pytest.param(m, marks=[pytest.mark.slow] if m in LONG else []) for m in modules]


def sampled():
    """Every release once, and every module that does not take long; all are in the whole grid."""
    names = [name for name in MODULES if name not in LONG]
    for number, release in enumerate(RELEASES):
        yield release, names[number % len(names)], None
    for number, module in enumerate(names):
        yield list(RELEASES)[number % len(RELEASES)], module, None


@pytest.mark.parametrize(("release", "module", "mode"), dict.fromkeys(sampled()))
def test_a_client_moves_the_sum_by_its_clip(release, module, mode):
    assert_bounded(trained(release, module, mode=mode))


@pytest.mark.slow
@pytest.mark.parametrize(("release", "module", "mode"), whole_grid())
def test_a_client_moves_every_sum_by_its_clip(release, module, mode):
    assert_bounded(trained(release, module, mode=mode))


@pytest.mark.parametrize("loss", [focal, contrasted])
@pytest.mark.parametrize("module", ["linear", "mlp", "tied"])
def test_own_losses(module, loss):
    assert_bounded(trained("central", module, loss=loss))


@pytest.mark.parametrize("module", marked(name for name in MODULES if "dropout" not in name))
def test_with_secure_noise_the_sum_moves_by_the_client_s_own_row_and_no_bit_more(module):
    training = trained("central, full batches", module, mode=Mode.LOOPED, secure=True)
    total, clip = summed(training, range(CLIENTS))
    own, _ = summed(training, [3])
    rest, _ = summed(training, [0, 1, 2, 4])
    assert torch.equal(total - rest, own)
    assert float(own.norm()) <= clip.value


@pytest.mark.parametrize("module", ["dropout", "transformer dropout"])
def test_with_secure_noise_masks_are_fresh_and_rows_within_the_clip(module):
    training = trained("central, full batches", module, mode=Mode.LOOPED, secure=True)
    rows = [summed(training, [3]) for _ in range(2)]
    assert not torch.equal(rows[0][0], rows[1][0])
    assert all(float(row.norm()) <= clip.value for row, clip in rows)


@pytest.mark.parametrize(
    "name",
    [
        "batch centred",
        "batch normed",
        "gate",
        "attention over clients",
        "trimmed to the batch",
    ],
)
def test_modules_whose_records_see_each_other_are_looped_and_never_vectorised(name):
    assert trained("central", name).engine.mode is Mode.LOOPED
    with pytest.raises(BadInput, match="records of a batch see each other"):
        trained("central", name, mode=Mode.VECTORISED)


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_no_claim_covers_are_refused_in_one_line(name):
    make, tokens, words = REFUSED[name]
    plan, work = RELEASES["central"]()
    with pytest.raises(BadInput, match=words) as refusal:
        fv.Training(task(make), records(tokens), plan, work)
    assert "\n" not in str(refusal.value)


def one_record_less(data, client, record):
    """The data with one record of a client taken out."""
    at = int(data.offsets[client]) + record
    offsets = data.offsets - (np.arange(len(data.offsets)) > client)
    rows = np.delete(np.arange(data.records), at)
    return replace(data, x=taken(data.x, rows), y=data.y[rows], offsets=offsets)


EVERY_STEP = [(module, mode) for module in MODULES for mode in Mode]
"""One mode or the other for every module; both in the slow part."""


@pytest.mark.parametrize(
    ("module", "mode"),
    [
        pytest.param(
            module,
            mode,
            marks=[] if number % 4 in (0, 3) and module not in LONG else [pytest.mark.slow],
        )
        for number, (module, mode) in enumerate(EVERY_STEP)
    ],
)
def test_a_record_moves_a_step_of_dp_sgd_by_its_clip(module, mode):
    """One step of all records, without noise, divided by a nominal number of records.

    The last record is taken out, and both draw from the same streams: the others keep their masks.
    """
    make, tokens = MODULES[module]
    clip, lr, nominal = 0.1, 0.5, 10
    plan = fv.dp_sgd(
        fv.samplers.Everyone(),
        CLIENTS,
        clip,
        rate=1.0,
        steps=1,
        nominal=nominal,
        rounds=1,
        budget=FREE,
        multiplier=1e-9,
    )
    work = fv.ClientDpSgd(plan.noisy_steps, lr=lr)
    data = records(tokens)
    sums = []
    for given in (data, one_record_less(data, 3, 16)):
        training = fv.Training(shared_task(make), given, plan, work, mode=mode, workers=1)
        vars(training)["streams"] = Streams(7)
        try:
            sums.append(
                training.engine.run(
                    training.round(1, np.array([3]), training.start())
                ).total.clone()
            )
        except RuntimeError:
            assert mode is Mode.VECTORISED  # no schedule for vmap: such modules are looped
            pytest.skip("the module has no vectorised form")
    length = float((sums[0] - sums[1]).norm())
    assert length <= lr * clip / nominal * (1 + 1e-4)
    assert (length > 1e-6) == (module != "batch centred")  # alone, a record is its own mean


RECORDS = [(release, module) for release in ("dp-sgd", "sites") for module in MODULES]
QUICK = [("dp-sgd", "linear"), ("dp-sgd", "attention"), ("sites", "tied"), ("sites", "lstm")]


def with_secure_records(release, module):
    """A secure training of one round of one step in which all records may join."""
    make, tokens = MODULES[module]
    made, data = shared_task(make), records(tokens)
    budget, more = planned_for(FREE), {"rate": 1.0, "rounds": 1, "multiplier": 2.0}
    if release == "sites":
        plan = fv.releases.sites(
            CLIENTS, 0.1, records=data.records, share="part", budget=budget, **more
        )
        work = fv.work.SiteSum(plan.noisy_steps)
    else:
        sampler = fv.samplers.Everyone()
        plan = fv.dp_sgd(sampler, CLIENTS, 0.1, steps=1, nominal=20, budget=budget, **more)
        work = fv.ClientDpSgd(plan.noisy_steps, lr=0.5)
    plan = with_secure_noise(plan, made.size, diagnostics=False)
    return fv.Training(made, data, plan, work, workers=1)


@pytest.mark.parametrize(
    ("release", "module"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in RECORDS
        if "dropout" not in case[1]  # with fresh masks no two sums are comparable
    ],
)
def test_with_secure_noise_a_sum_moves_by_the_record_s_own_row_and_no_bit_more(
    monkeypatch, release, module
):
    """The sum of client 3 through the whole round: all of its records, all but one, that one."""
    training, sums, joining = with_secure_records(release, module), {}, {}

    def chosen(*_):
        return joining["now"].numpy()[None, :]

    monkeypatch.setattr(works, "_joined", chosen)
    one = torch.arange(17) == 5
    for name, joined in {"all": one | True, "others": ~one, "own": one}.items():
        joining["now"] = joined
        monkeypatch.setattr(
            works, "add_to_sum_", lambda m, total, *_, n=name: sums.update({n: total.clone()})
        )
        training.engine.run(training.round(1, np.array([3]), training.start()))
    assert torch.equal(sums["all"] - sums["others"], sums["own"])
    assert float(sums["own"].norm()) <= 0.1
    assert sums["own"].any() == (module != "batch centred")  # alone, a record is its own mean
    assert sums["others"].any() == (module != "batch centred")
