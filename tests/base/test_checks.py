"""What a value may be: recipes and constructors refuse the same with one line."""

import math
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from fedveil.base import checks
from fedveil.base.checks import OPTIONS, ROUNDS, Each, Limits, check_workers, one_of
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.clip import Norm
from fedveil.privacy.clip_schedules import Fixed, Median, Poly, Quantile
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.release import NoisySteps
from fedveil.privacy.releases.central import central
from fedveil.privacy.releases.client_noise import client_noise
from fedveil.privacy.releases.dp_sgd import dp_sgd
from fedveil.privacy.releases.two_point import two_point
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson, RoundRobin
from fedveil.runs.recipe import Recipe, load_recipe
from fedveil.runs.sections.section import forms_of, table_section
from fedveil.training.cohort import Batches
from fedveil.training.server import AdamServer, SgdServer
from fedveil.training.work import ClientDpSgd, ClientSgd, Decay


def limits_of():
    """The limits of every number of a recipe, and of the command line's options, by name."""
    found = {f"--{name}": limits for name, limits in OPTIONS.items()}
    for path, field in fields_of():
        for limits in field.metadata:
            limits = limits.limits if isinstance(limits, Each) else limits
            if isinstance(limits, Limits):
                found[path] = limits
    return found


def fields_of():
    """The keys of a recipe with their fields, in all kinds of its sections."""
    for name, forms in forms_of(Recipe).items():
        if not forms:
            yield name, Recipe.model_fields[name]
        for form in forms.values():
            for key, field in form.model_fields.items():
                yield f"{name}.{key}", field
                inner = table_section(field.annotation)
                for part, one in inner.model_fields.items() if inner else ():
                    yield f"{name}.{key}.NAME.{part}", one


VALUES = limits_of()
NO_NUMBER = ("1", None, [1], {"a": 1}, (1,), 1j, np.array([1.0, 2.0]), object(), True)


def test_what_is_no_number_is_refused_by_every_name():
    for name in VALUES:
        for value in NO_NUMBER:
            with pytest.raises(BadInput, match="number is needed") as refusal:
                VALUES[name].check(name, value)
            assert str(refusal.value).startswith(f"{name} is ")
            assert "\n" not in str(refusal.value)


def test_half_a_thing_is_refused():
    for name in [name for name, limits in VALUES.items() if limits.whole]:
        for value in (2.5, 2.0, np.float64(2.0)):
            with pytest.raises(BadInput, match=r"a whole number is needed"):
                VALUES[name].check(name, value)
        VALUES[name].check(name, np.int64(32))


def test_nan_and_minus_infinity_are_never_a_value():
    for name in VALUES:
        for value in (math.nan, -math.inf):
            with pytest.raises(BadInput, match=f"^{name} is "):
                VALUES[name].check(name, value)


ENDS = {
    "seed": (0, 2**63 - 1, -1, 2**63),
    "rounds": (1, 10**6, 0, 10**6 + 1),
    "client.steps": (1, 10**6, 0, 10**6 + 1),
    "sample.rate": (1e-12, 1.0, 0.9e-12, 1.0000001),
    "sample.size": (1, 10**15, 0, None),
    "client.batch": (0, 10**15, -1, None),
    "client.lr": (1e-300, 1e300, 0.0, math.inf),
    "client.momentum": (0.0, 0.999, -0.001, 1.0),
    "client.weight_decay": (0.0, 1e300, -1e-9, math.inf),
    "clip.value": (1e-20, 1e30, 0.9e-20, 1.1e30),
    "clip.quantile": (1e-9, 0.999, 0.0, 1.0),
    "clip.growth": (1.0, 1e9, 0.999, math.inf),
    "clip.bit_epsilon": (0.0, 50.0, -0.1, 50.1),
    "noise.multiplier": (0.0, 1e6, -1e-9, 1.1e6),
    "noise.epsilon": (1e-6, 1e6, 0.9e-6, 1.1e6),
    "budget.epsilon": (1e-300, math.inf, 0.0, None),
    "budget.delta": (1e-100, 0.999, 0.9e-100, 1.0),
    "--noise": (1e-300, 1e6, 0.0, 1.1e6),
    "engine.chunk": (0, 10**15, -1, None),
    "server.beta2": (0.0, 0.999, -0.1, 1.0),
    "client.proximal": (0.0, 1e300, -1e-9, math.inf),
    "client.floor": (1e-300, 1e300, 0.0, math.inf),
    "client.warmup": (0, 10**6, -1, 10**6 + 1),
    "server.lr_floor": (0.0, 0.999, -0.1, 1.0),
}


def test_the_ends_of_what_is_possible():
    for name in ENDS:
        least, most, below, above = ENDS[name]
        VALUES[name].check(name, least)
        VALUES[name].check(name, most)
        for value in (below, above):
            if value is not None:
                with pytest.raises(BadInput, match=f"^{name} is "):
                    VALUES[name].check(name, value)


OF_TABLES = {f"data.columns.NAME.{key}" for key in ("low", "high", "mean", "std", "values", "fill")}
"""Refused by `Column`, whose tests are tests/data/test_columns.py; a share by `split_table`."""


def test_every_number_of_a_recipe_has_limits():
    others = {"engine.workers", "engine.timings", "data.test", "data.sites", "model.options"}
    for path, field in fields_of():
        if re.search(r"\b(int|float)\b", str(field.annotation)) and path not in others | OF_TABLES:
            assert any(isinstance(limits, Limits | Each) for limits in field.metadata), path


WORDS = {
    "seed": "a number from 0 to 2^63 - 1",
    "rounds": "at least one, at most 1,000,000",
    "sample.rate": "a probability in (0, 1], at least 1e-12",
    "client.batch": "a size, or 0 for all records",
    "clip.value": "a number of at least 1e-20, at most 1e+30",
    "clip.centre": "a finite number, at most 1e+30",
    "engine.workers": "0 to 64, or to 4 per core where that is more",
    "data.name": "",
}


def test_each_of_several_values_is_checked():
    limits = Each(ROUNDS)
    limits.check("x", [1, 2])
    with pytest.raises(BadInput, match="x is empty: give at least one number"):
        limits.check("x", [])
    with pytest.raises(BadInput, match="x is 0: at least one is needed"):
        limits.check("x", [1, 0])


def test_limits_in_words():
    for name in WORDS:
        allowed = {
            ", ".join(limits.text for limits in field.metadata)
            for path, field in fields_of()
            if path == name
        }
        assert allowed == {WORDS[name]}


def test_words_are_those_of_the_refusals():
    for limits in VALUES.values():
        assert limits.text
        for _, need in limits.tests:
            assert any(need.startswith(word) for word in limits.text.split(", "))
        assert "needed" not in limits.text
        assert "possible" not in limits.text


REFUSED = {
    "rate as text": (lambda: Poisson("0.5"), "rate is '0.5'"),
    "half a client": (lambda: FixedSize(2.5), "size is 2.5"),
    "size that only looks whole": (lambda: FixedSize(2.0), "size is 2.0"),
    "half a turn": (lambda: FixedSize(2, 1.5), "max_participations is 1.5"),
    "half a client in turn": (lambda: RoundRobin(0.5), "size is 0.5"),
    "size true": (lambda: RoundRobin(True), "size is True"),
    "clip as text": (lambda: Fixed("1"), "value is '1'"),
    "norm as text": (lambda: Fixed(1.0, "l1"), "norm is 'l1': use one of Norm.L1"),
    "norm of a decaying clip as text": (
        lambda: Poly(1.0, 1.0, 5, 0.1, "l2"),
        "norm is 'l2'",
    ),
    "rounds of a decaying clip": (lambda: Poly(1.0, 1.0, 2.5, 0.1), "rounds is 2.5"),
    "floor as text": (lambda: Poly(1.0, 1.0, 5, "0"), "floor is '0'"),
    "quantile as text": (lambda: Quantile(1.0, "0.5", noise=1.0), "target is '0.5'"),
    "bit noise as text": (lambda: Quantile(1.0, 0.5, noise="1"), "noise is '1'"),
    "half a power": (lambda: Median(1.0, -1.5, 3, 1, Budget(1, 1e-5)), "low is -1.5"),
    "half a round": (lambda: Median(1.0, -1, 3, 0.5, Budget(1, 1e-5)), "every is 0.5"),
    "epsilon as text": (lambda: Budget("x", 1e-5), "epsilon is 'x': a number is needed"),
    "no epsilon": (lambda: Budget(None, 1e-5), "epsilon is None"),
    "delta as text": (lambda: Budget(1.0, "1e-5"), "delta is '1e-5'"),
    "half a step": (lambda: Batches(0, steps=2.5), "steps is 2.5"),
    "half an epoch": (lambda: Batches(0, epochs=0.5), "epochs is 0.5"),
    "more steps than anyone takes": (lambda: Batches(0, steps=10**7), "steps is 10000000"),
    "half a batch": (lambda: Batches(1.5, steps=1), "size is 1.5"),
    "batch none": (lambda: Batches(None, steps=1), "size is None"),
    "lr as text": (lambda: ClientSgd(Batches(0, steps=1), "0.1"), "lr is '0.1'"),
    "steps for batches": (lambda: ClientSgd(5, 0.1), "batches is 5"),
    "rate for decay": (lambda: ClientSgd(Batches(0, steps=1), 0.1, decay=0.5), "decay is 0.5"),
    "mu as text": (lambda: Decay("1", 1.0), "mu is '1'"),
    "dp-sgd rate 2": (lambda: NoisySteps(2.0, 1, 1.0), "rate is 2.0"),
    "dp-sgd half a step": (lambda: NoisySteps(0.5, 1.5, 1.0), "steps is 1.5"),
    "dp-sgd without steps": (lambda: NoisySteps(0.5, 0, 1.0), "steps is 0"),
    "dp-sgd negative noise": (lambda: NoisySteps(0.5, 1, -1.0), "multiplier is -1.0"),
    "dp-sgd half a record": (lambda: NoisySteps(0.5, 1, 1.0, 2.5), "nominal is 2.5"),
    "dp-sgd lr as text": (lambda: ClientDpSgd(NoisySteps(0.5, 1, 1.0), "1"), "lr is '1'"),
    "server lr as text": (lambda: SgdServer("1"), "lr is '1'"),
    "adam without memory": (lambda: AdamServer(beta2=1.0), "beta2 is 1.0"),
    "adam beta nan": (lambda: AdamServer(beta1=math.nan), "beta1 is nan"),
    "adam without a floor": (lambda: AdamServer(floor=0.0), "floor is 0.0"),
    "plan of half a round": (lambda: PrivacyPlan(Everyone(), 9, 2.5), "rounds is 2.5"),
    "plan of half a client": (lambda: PrivacyPlan(Everyone(), 9.5, 2), "clients is 9.5"),
    "plan without rounds": (lambda: PrivacyPlan(Everyone(), 9, None), "rounds is None"),
    "schedule as text": (lambda: PrivacyPlan(Everyone(), 9, 2, "fixed"), "the clip is 'fixed'"),
    "central with half a round": (
        lambda: central(Poisson(0.5), 9, Fixed(1.0), rounds=2.5, budget=Budget(1.0, 1e-5)),
        "rounds is 2.5",
    ),
    "central with noise as text": (
        lambda: central(
            Poisson(0.5), 9, Fixed(1.0), rounds=2, budget=Budget(1.0, 1e-5), multiplier="2"
        ),
        "multiplier is '2'",
    ),
    "local with half a round": (
        lambda: client_noise(
            Everyone(), 9, Fixed(1.0), laplace=False, rounds=2.5, budgets=(Budget(1.0, 1e-5),)
        ),
        "rounds is 2.5",
    ),
    "local steps as text": (
        lambda: dp_sgd(
            Everyone(),
            9,
            1.0,
            rate="0.5",
            steps=1,
            rounds=2,
            budget=Budget(1.0, 1e-5),
        ),
        "rate is '0.5'",
    ),
    "two-point with half a round": (
        lambda: two_point(
            Everyone(),
            9,
            Ranges(0.0, 1.0, (3,), False, Perturb.UPDATE),
            epsilon=1.0,
            rounds=1.5,
            budget=Budget(math.inf, 1e-5),
        ),
        "rounds is 1.5",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_constructors_refuse_what_is_not_what_its_name_says(make, message):
    with pytest.raises(BadInput) as refusal:
        make()
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_numbers_of_numpy_are_numbers():
    assert FixedSize(np.int64(3)).size == 3
    assert Poisson(np.float64(0.5)).rate == 0.5
    assert Fixed(np.float32(1.0)).value == 1.0


def test_a_member_and_not_its_text():
    one_of("norm", Norm.L2, Norm)
    with pytest.raises(BadInput, match=r"norm is 'l2': use one of Norm\.L1, Norm\.L2"):
        one_of("norm", "l2", Norm)


def test_a_long_value_is_cut_short():
    with pytest.raises(BadInput) as refusal:
        ROUNDS.check("rounds", "x\n" * 10_000)
    assert len(str(refusal.value)) < 200
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("cores", "most"), [(1, 64), (16, 64), (17, 68), (100, 400)])
def test_workers_are_limited_by_the_machine(monkeypatch, cores, most):
    monkeypatch.setattr(checks, "cores", lambda: cores)
    check_workers("--workers", most)
    check_workers("--workers", 0)
    for value in (most + 1, -1, 1000, 1.5, "2"):
        with pytest.raises(BadInput, match=r"^--workers is "):
            check_workers("--workers", value)


def test_the_first_test_that_fails_is_told():
    limits = Limits(((lambda v: v > 0, "first"), (lambda v: v > 5, "second")))
    with pytest.raises(BadInput, match="x is -1: first"):
        limits.check("x", -1)
    with pytest.raises(BadInput, match="x is 3: second"):
        limits.check("x", 3)


HEAVY = ("torch", "numpy", "scipy", "sklearn", "dp_accounting", "matplotlib")


@pytest.mark.parametrize(
    "setting",
    [
        "rounds=-5",
        "sample.rate=2",
        "seed=-1",
        "noise.multiplier=-1",
        "engine.chunk=-3",
        "engine.workers=1000",
        "client.lr=0",
        "budget.delta=2",
        "clip.value=nan",
    ],
)
def test_values_are_refused_before_anything_heavy_is_imported(setting):
    program = (
        "import sys\n"
        "from fedveil.cli import main as cli\n"
        f"sys.argv = ['fedveil', 'run', '--set', {setting!r}]\n"
        "try:\n"
        "    cli.main()\n"
        "finally:\n"
        f"    print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "[]\n"), ended.stderr
    assert ended.stderr.startswith(f"error: {setting.partition('=')[0]} is ")
    assert time.monotonic() - began < 10  # 0.3 s on an idle machine


def test_rounds_from_iterations_are_checked_as_well():
    with pytest.raises(BadInput, match=r"rounds is 2000000: at most 1,000,000 are possible"):
        load_recipe("dp-fedavg", ["rounds=none", "iterations=2000000", "client.steps=1"])
