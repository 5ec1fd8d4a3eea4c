"""Plans with noise at the clients, changed by keyword."""

from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.clip import Norm
from fedveil.privacy.clip_schedules import Fixed
from fedveil.privacy.releases.client_noise import client_noise
from fedveil.privacy.sampling import Everyone

L2, L1 = Fixed(1.0), Fixed(1.0, Norm.L1)
BUDGET = Budget(3.0, 1e-5)


def plan_of(sampler=None, schedule=L2, *, laplace=False, rounds=10, population=1000, **changes):
    settings = {"budgets": (BUDGET,), **changes}
    return client_noise(
        sampler or Everyone(), population, schedule, laplace=laplace, rounds=rounds, **settings
    )
