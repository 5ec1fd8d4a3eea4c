"""The first [policy] of a new site: what the recipe needs its owner to allow, and no more."""

import math
from decimal import ROUND_CEILING, Context

from fedveil.data.federated import FederatedData
from fedveil.flower.terms import Terms, terms_of
from fedveil.privacy.accounting.claims import NoiseSource, Trust, Unit
from fedveil.privacy.plan import PrivacyPlan
from fedveil.runs.build import build
from fedveil.runs.recipe import Recipe
from fedveil.training.engines.engine import Engine, Job
from fedveil.training.session import Training

_DIGITS = 4


def policy_text(recipe: Recipe, plan: PrivacyPlan | None, number: int) -> str:
    """The keys of a policy, a line each, that site `number` can take part with.

    What taking part costs follows from the plan if it is known, or else from the recipe's budget.
    What does not follow from either is left to the owner.
    """
    if plan is None:
        return "\n".join(_of_recipe(recipe))
    return "\n".join(_of_terms(terms_of(plan, number, repeats=0)))


def training_for(recipe: Recipe, data: FederatedData) -> Training:
    """A recipe over sites that have these clients' records: its plan, and nothing to train on."""
    everyone = data.at_sites([str(k) for k in range(data.clients)], data.sizes.tolist())
    return build(recipe, data=everyone, make_engine=no_engine)


def _of_terms(terms: Terms) -> list[str]:
    claims = terms.cost
    if not claims:
        return [_UNPROTECTED]
    lines = []
    for unit in (Unit.CLIENT, Unit.RECORD):
        costs = [claim.epsilon for claim in claims if claim.unit is unit]
        if costs:
            lines.append(
                f"epsilon.{unit} = {_up(math.fsum(costs))}  # what this recipe costs in all"
            )
    lines.append(f"delta = {_up(math.fsum(claim.delta for claim in claims))}")
    trust = {claim.trust for claim in claims}
    seeded = any(line.noise is NoiseSource.SEEDED for line in terms.charged)
    return [*lines, *_trusting(trust), *([_SEEDED] if seeded else [])]


def _of_recipe(recipe: Recipe) -> list[str]:
    if recipe.noise.kind == "none" or recipe.budget is None:
        return [_UNPROTECTED]
    inside = recipe.client.kind == "dp-sgd"
    unit = Unit.RECORD if inside else Unit.CLIENT
    epsilon = getattr(recipe.budget, "epsilon", None)
    lines = [f"# epsilon.{unit} = ...  # the most that all runs may cost; nothing is taken without"]
    if epsilon is not None and math.isfinite(epsilon):
        lines = [f"epsilon.{unit} = {epsilon}  # the recipe's budget"]
    lines.append(f"delta = {recipe.budget.delta}")
    central = not inside and getattr(recipe.noise, "where", None) == "server"
    seeded = getattr(recipe.noise, "source", "seeded") == "seeded"
    trust = {Trust.CENTRAL if central else Trust.LOCAL}
    return [*lines, *_trusting(trust), *([_SEEDED] if seeded else [])]


_UNPROTECTED = "unprotected = true  # the recipe claims nothing: what this site sends is not hidden"
_SEEDED = "seeded = true  # the recipe has no secure noise, or does not ask for it"


def _trusting(trust: set[Trust]) -> list[str]:
    if trust == {Trust.LOCAL}:
        return []
    listed = ", ".join(f'"{one}"' for one in sorted(map(str, trust)))
    return [f"trust = [{listed}]  # whom this site relies on beside itself"]


def _up(number: float) -> str:
    """A number in few digits that is not smaller."""
    if not math.isfinite(number):
        return repr(number)
    return repr(float(Context(_DIGITS, ROUND_CEILING).create_decimal(repr(number))))


def no_engine(job: Job) -> Engine:
    """The engine of a training that is built for its plan only, and never started."""
    raise AssertionError("a training that is made for its plan alone was started")
