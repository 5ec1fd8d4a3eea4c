"""`fedveil audit --self-test`: audit every release on this machine."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from fedveil.audit.findings import ALARM, Finding
from fedveil.audit.randomisers import Randomiser
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.clip_schedules import Fixed, Poly, Quantile
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.releases.central import central
from fedveil.privacy.releases.client_noise import client_noise
from fedveil.privacy.releases.dp_sgd import dp_sgd
from fedveil.privacy.releases.priv_unit import priv_unit
from fedveil.privacy.releases.two_point import two_point
from fedveil.privacy.rows import Norm
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson
from fedveil.privacy.secure import planned_for, secured

CLIENTS, ROUNDS = 100, 4
BUDGET = Budget(8.0, 1e-5)


def plans() -> dict[str, PrivacyPlan]:
    """A small plan for every release, by name."""
    many = Everyone(), CLIENTS
    ranges = Ranges(0.0, 0.5, (60, 4), adaptive=False, perturb=Perturb.UPDATE)

    def local(clip: Fixed | Poly | Quantile, *, laplace: bool = False) -> PrivacyPlan:
        rounds = 1 if isinstance(clip, Quantile) else ROUNDS
        return client_noise(*many, clip, laplace=laplace, rounds=rounds, budgets=(BUDGET,))

    few = FixedSize(10)
    free = Budget(float("inf"), 1e-5)
    return {
        "central": central(*many, Fixed(1.0), rounds=ROUNDS, budget=BUDGET),
        "central, Poisson": central(
            Poisson(0.1), CLIENTS, Fixed(1.0), rounds=ROUNDS, budget=BUDGET
        ),
        "central, fixed size": central(
            few, CLIENTS, Fixed(1.0), rounds=ROUNDS, budget=free, multiplier=1.0
        ),
        "central, secure": secured(
            central(*many, Fixed(1.0), rounds=ROUNDS, budget=planned_for(BUDGET)),
            4,
            diagnostics=False,
        ),
        "client, Gaussian": local(Fixed(1.0)),
        "client, clip decay": local(Poly(1.0, 1.0, ROUNDS, 0.1)),
        "client, Laplace": local(Fixed(1.0, Norm.L1), laplace=True),
        "client, Gaussian and curator": local(Quantile(1.0, 0.5, noise=5.0)),
        "client, Gaussian and bit": local(Quantile(1.0, 0.5, flip=1.0)),
        "PrivUnitG": priv_unit(*many, Fixed(1.0), parameters=20, rounds=2, budget=BUDGET),
        "two-point": two_point(
            *many, ranges, epsilon=1.0, rounds=1, budget=free, shuffled=CLIENTS // 2
        ),
        "DP-SGD": dp_sgd(*many, 1.0, rate=0.2, steps=3, rounds=ROUNDS, budget=BUDGET),
    }


def self_test(
    randomiser: Randomiser, on_plan: Callable[[int, int, str], None] = lambda done, of, name: None
) -> Iterator[Finding]:
    """Findings about every release. A false alarm in any of them has probability 1e-4."""
    every, found = plans(), []
    for number, (name, plan) in enumerate(every.items()):
        found += [replace(each, attack=name) for each in randomiser.findings(plan)]
        on_plan(number + 1, len(every), name)
    for each in found:
        yield replace(each, alarm=ALARM / len(found))
