"""What all releases have in common in which clients protect themselves from the server.

Any two inputs of a client are neighbours (replacement), a client is charged for the rounds in
which it takes part, and no sampling amplifies anything: the server knows who reported.
"""

from fedveil.base.checks import CLIENTS, MULTIPLIER, ROUNDS
from fedveil.base.errors import BadArgument
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.claims import SEEDED, NoiseSource, Relation, Trust, Unit
from fedveil.privacy.accounting.events import Event, Gaussian
from fedveil.privacy.sampling import FixedSize, Sampler

TURNS = "who takes part, and how often, is public"


def line_of(
    sampler: Sampler, population: int, budget: Budget, event: Event | None = None
) -> BudgetLine:
    """The line of a client's own reports."""
    return BudgetLine(
        event=event or Gaussian(1.0),
        share=sampler.share(population),
        cap=sampler.max_participations if isinstance(sampler, FixedSize) else None,
        budget=budget,
        unit=Unit.CLIENT,
        relation=Relation.REPLACE,
        trust=Trust.LOCAL,
        noise=NoiseSource.SEEDED,
        assumptions=(
            "the server is not trusted; each client randomises its own report honestly",
            TURNS,
            SEEDED,
        ),
    )


def check_multiplier(multiplier: float | None) -> None:
    """Refuse noise of no size."""
    if multiplier is not None:
        MULTIPLIER.check("multiplier", multiplier)
    if multiplier == 0:
        raise BadArgument("{multiplier} is 0: a positive number is needed", "multiplier")


def check_sampler(sampler: Sampler, population: int, rounds: int) -> None:
    """Refuse cohorts that nobody could fill to the last round."""
    CLIENTS.check("clients", population)
    ROUNDS.check("rounds", rounds)
    sampler.check(population)
    if not isinstance(sampler, FixedSize) or sampler.max_participations is None:
        return
    cap = sampler.max_participations
    if sampler.size * rounds > population * cap:
        last = population * cap // sampler.size
        raise BadArgument(
            f"{{max_participations}} is {cap}: after round {last} of {rounds} every one of "
            f"{population} clients would be at its cap; raise it or run fewer rounds",
            "max_participations",
        )
