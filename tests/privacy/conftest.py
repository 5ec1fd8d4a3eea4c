"""What several tests of `privacy` need."""

from fractions import Fraction

import pytest

from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.claims import NoiseSource, Relation, Trust, Unit
from fedveil.privacy.accounting.events import Gaussian


@pytest.fixture
def make_line():
    """BudgetLine of a plain Gaussian in every round, changed by keyword."""

    def make(**changes):
        settings = {
            "event": Gaussian(4.0),
            "share": Fraction(1),
            "budget": Budget(3.0, 1e-5),
            "unit": Unit.CLIENT,
            "relation": Relation.ZERO_OUT,
            "trust": Trust.CENTRAL,
            "noise": NoiseSource.SEEDED,
            "assumptions": ("the server is trusted",),
        }
        return BudgetLine(**{**settings, **changes})

    return make
