"""What a claim means: in a sentence for people who have never heard of epsilon, and in odds.

(epsilon, delta)-differential privacy bounds every test between two worlds that differ in one unit.
At a false-alarm rate of a, the power of a test is at most

    min(e^epsilon a + delta,  1 - e^-epsilon (1 - delta - a),  1),

and its share of right answers, when both worlds are equally likely beforehand, at most
(e^epsilon + delta) / (1 + e^epsilon) (Wasserman and Zhou 2010; Kairouz, Oh and Viswanath 2015).
Numbers are rounded up: a sentence never promises more than the claim.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from fedveil.privacy.accounting.claims import (
    TRUSTED_SERVER,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)

ALARMS = {"1 in 1,000": 1e-3, "1 in 100": 1e-2, "1 in 10": 1e-1}
"""False-alarm rates at which the power is told."""


class Strength(StrEnum):
    """How much of a promise a claim is to the one that it is about, in the worst case."""

    NONE = "none"
    NOTHING = "next to nothing"
    WEAK = "weak"
    MODERATE = "moderate"
    STRONG = "strong"


_STRENGTHS = {Strength.NOTHING: 0.999, Strength.WEAK: 0.95, Strength.MODERATE: 0.625}
"""The least share of right guesses of each, from the weakest on."""

_PROMISES = {
    Strength.NOTHING: (
        "That promises next to nothing: at an epsilon this large such an attacker may be all but "
        "certain. Known attacks may do worse than that, but nothing guarantees it."
    ),
    Strength.WEAK: "That is a weak promise: such an attacker may be nearly certain about somebody.",
    Strength.MODERATE: "That leaves doubt, and lets such an attacker learn a good deal.",
    Strength.STRONG: "That is little better than tossing a coin.",
}

_SEES = {
    Trust.CENTRAL: "Whoever sees this model, and every model on the way to it,",
    Trust.LOCAL: "Whoever sees everything that a client sends, as the server does,",
    Trust.CURATOR: "Whoever sees everything that the server sees,",
    Trust.SHUFFLED: "Whoever sees everything that the shuffler hands on, as the server does,",
}

_TRUSTED = {
    Trust.CENTRAL: (
        "The server has to be trusted: it sees every client's true update, and adds the noise."
    ),
    Trust.LOCAL: (
        "Nobody has to be trusted but the software at the client itself: what it sends is "
        "randomised before it is sent, and the server need not be trusted."
    ),
    Trust.CURATOR: (
        "A curator has to be trusted, who is not the server and sees a bit or a length from each "
        "client; the server need not be."
    ),
    Trust.SHUFFLED: (
        "A shuffler has to be trusted to hide who sent what, and enough other clients to report "
        "honestly; the server need not be."
    ),
}

_WORLDS = {
    (Unit.CLIENT, Relation.ADD_REMOVE): "whether a given client took part",
    (Unit.CLIENT, Relation.ZERO_OUT): (
        "whether a given client contributed its data or nothing at all"
    ),
    (Unit.CLIENT, Relation.REPLACE): "whether a client's data are its own or any others",
    (Unit.RECORD, Relation.ADD_REMOVE): "whether a given record was among a client's data",
    (Unit.RECORD, Relation.ZERO_OUT): "whether a given record was used or counted as nothing",
    (Unit.RECORD, Relation.REPLACE): "whether a record of a client is its own or any other",
    (Unit.WEIGHT, Relation.ADD_REMOVE): "whether one weight of a client was sent in one round",
    (Unit.WEIGHT, Relation.ZERO_OUT): "whether one weight of a client in one round is its or zero",
    (Unit.WEIGHT, Relation.REPLACE): "whether one weight of a client in one round is this or that",
}

_UNITS = {
    Unit.CLIENT: (
        "One client, with all of its records. Somebody whose data are at several clients has a "
        "larger epsilon."
    ),
    Unit.RECORD: (
        "One record of one client, and not the client. Somebody with several records has a larger "
        "epsilon, and so has a client as a whole."
    ),
    Unit.WEIGHT: (
        "One number out of a client's report of one round. A client sends many of them, in many "
        "rounds: nobody is protected by this alone."
    ),
}

_WORLDS_OF_SEVERAL = {
    Relation.ADD_REMOVE: "whether {these} were there",
    Relation.ZERO_OUT: "whether {these} were used or counted as nothing",
    Relation.REPLACE: "whether the data of {these} are their own or any others",
}

SEVERAL = (1, 2, 4, 8)
"""Numbers of units of one person for which a report has the epsilon."""

NOTHING_CLAIMED = (
    "Nothing is promised. Whoever sees this model may learn anything about anybody whose data it "
    "was trained on."
)


def counting(claims: Sequence[PrivacyClaim]) -> PrivacyClaim | None:
    """The headline claim: the first that is a guarantee, else the first, None without any.

    Whoever shows one number of several claims shows this one. A claim with a condition never
    counts.
    """
    whole = [claim for claim in claims if not claim.condition]
    return next((c for c in whole if not c.as_published), whole[0] if whole else None)


def budgeted(claims: Sequence[PrivacyClaim]) -> PrivacyClaim | None:
    """The claim of the line that the budget limits, from which what is left is computed.

    It is the one that counts, but for recipes as published: there the paper's formula is limited.
    """
    return next((claim for claim in claims if not claim.condition), None)


def smaller(claims: Sequence[PrivacyClaim]) -> PrivacyClaim | None:
    """The conditional claim that is smaller than the headline claim, None if there is none."""
    first = counting(claims)
    if first is None:
        return None
    return next((c for c in claims if c.condition and _promised(c) == _promised(first)), None)


_promised = attrgetter(
    "delta", "unit", "neighbours", "trust", "accountant", "noise", "holds_for", "covers"
)
"""Everything of a claim but its epsilon and what it rests on."""


def right_guesses(claim: PrivacyClaim) -> float:
    """The largest share of right guesses between two worlds that are equally likely beforehand.

    | edge | behaviour |
    |---|---|
    | epsilon 0, delta 0 | 1/2: tossing a coin |
    | epsilon infinite, or e^epsilon beyond floating point | 1 |
    | delta 1 | 1 |
    """
    return 1 - (1 - claim.delta) / (1 + _odds(claim))


def power(claim: PrivacyClaim, alarms: float) -> float:
    """The largest share of true cases found by a test with that share of false alarms.

    | edge | behaviour |
    |---|---|
    | epsilon 0, delta 0 | as many as false alarms |
    | no false alarms at all | delta, or 1 - e^-epsilon (1 - delta) where that is less |
    | epsilon infinite | 1 |
    """
    odds = _odds(claim)
    if math.isinf(odds):
        return 1.0
    return min(odds * alarms + claim.delta, 1 - (1 - claim.delta - alarms) / odds, 1.0)


@dataclass(frozen=True)
class Meaning:
    """What a run's claims mean: `claim` is the one that counts, None where nothing is claimed.

    `smaller` is the same claim on a condition, `published` a paper's formula that was limited.
    """

    claim: PrivacyClaim | None
    published: PrivacyClaim | None = None
    smaller: PrivacyClaim | None = None

    @classmethod
    def from_claims(cls, claims: Sequence[PrivacyClaim]) -> "Meaning":
        """Of all that a run claims."""
        claim = counting(claims)
        published = next((c for c in claims if c.as_published and c is not claim), None)
        first = budgeted(claims)
        charged = first is not None and first.as_published
        return cls(claim, published if charged else None, smaller(claims))

    @property
    def guaranteed(self) -> bool:
        """Whether anything is promised at all."""
        return self.claim is not None and not self.claim.as_published and self.claim.vouched

    @property
    def strength(self) -> Strength:
        """By the share of right guesses that the claim permits."""
        if self.claim is None or not self.guaranteed:
            return Strength.NONE
        share = right_guesses(self.claim)
        for strength, least in _STRENGTHS.items():
            if share >= least:
                return strength
        return Strength.STRONG

    @property
    def sentence(self) -> str:
        """The claim, for somebody who is no specialist."""
        claim = self.claim
        if claim is None:
            return NOTHING_CLAIMED
        if claim.as_published:
            return (
                f"Nothing is guaranteed. A paper's formula comes to {claim.short}, which is "
                "how its authors count, and no bound on what an attacker may learn."
            )
        if not claim.vouched:
            return f"Nothing is vouched for: {claim.short} is about right, and no guarantee."
        whose = "" if claim.holds_for == "everyone" else f" This is for {claim.holds_for}."
        rest = "everything about everyone else"
        if claim.unit is Unit.RECORD:
            rest = "every other record"
        share = _share(right_guesses(claim))
        most = f"and be right {share} times at most; tossing a coin is right 50 in 100 times"
        if share == _share(1.0):
            most = "and may be right every time, as far as this claim goes"
        return f"{_SEES[claim.trust]} and knows {rest}, can guess {self.worlds} {most}.{whose}"

    @property
    def worlds(self) -> str:
        """Between which two worlds an attacker has to tell."""
        if self.claim is None:
            return ""
        claim = self.claim
        if claim.units > 1:
            these = f"{claim.units} {claim.unit}s of one person"
            return _WORLDS_OF_SEVERAL[claim.neighbours].format(these=these)
        return _WORLDS[claim.unit, claim.neighbours]

    @property
    def worth(self) -> str:
        """How strong the promise is, "" where there is none."""
        return _PROMISES.get(self.strength, "")

    @property
    def warnings(self) -> list[str]:
        """What has to be said beside the sentence, however short the page."""
        claim, warnings = self.claim, []
        if claim is None:
            return []
        if claim.noise is NoiseSource.SEEDED:
            warnings.append(
                "This is a simulation: its noise follows from a seed, and whoever knows the seed "
                'can remove it. A model that is given away needs noise.source = "secure".'
            )
        if self.smaller is not None:
            short = self.smaller.short
            warnings.append(
                f"That holds whoever ended the run and why. {short[:1].upper()}{short[1:]}."
            )
        if self.published is not None:
            warnings.append(
                f"The paper's own formula comes to {self.published.short}. That is how its "
                "authors count, and it is not a guarantee."
            )
        return warnings

    @property
    def unit(self) -> str:
        """Whom or what the claim is about."""
        return "Nobody." if self.claim is None else _UNITS[self.claim.unit]

    def several(self) -> list[dict[str, str]]:
        """Epsilons of a person with several units, at the claim's delta. May be empty.

        Computed when it is called: it may take a second.
        """
        claim = self._about_one_unit
        if claim is None or not claim.answers:
            return []
        rows = []
        for units in SEVERAL:
            more = claim.for_units(units)
            share = _share(right_guesses(more)) if more.vouched else "no bound"
            name = f"{claim.unit}s of one person"
            rows.append({name: f"{units}", "epsilon": more.value, "right guesses at most": share})
        return rows

    @property
    def several_unknown(self) -> str:
        """Why there is no epsilon for several units, "" where there is one or none is needed."""
        claim = self._about_one_unit
        if claim is None or claim.answers:
            return ""
        return (
            f"The epsilon of somebody with several {claim.unit}s is larger, and cannot be "
            "computed: the claim does not record what was composed."
        )

    @property
    def _about_one_unit(self) -> PrivacyClaim | None:
        """The claim if it promises something about one unit of which somebody may have more."""
        claim = self.claim
        if claim is None or claim.unit is Unit.WEIGHT or claim.units > 1:
            return None
        return claim if self.guaranteed else None

    @property
    def trusted(self) -> str:
        """Whom one has to trust for it to hold."""
        if self.claim is None:
            return "Everybody who takes part, and everybody who sees the model."
        return _TRUSTED[self.claim.trust]

    @property
    def conditions(self) -> list[str]:
        """The conditions under which the claim holds. Whom one has to trust is listed once."""
        if self.claim is None:
            return []
        return [self.trusted, *(a for a in self.claim.assumptions if a != TRUSTED_SERVER)]

    @property
    def uncovered(self) -> list[str]:
        """What the claim does not cover."""
        if self.claim is None:
            return []
        uncovered = [
            "What is true of people in general, and would be learnt from others as well.",
            "Other runs on the same data, trials included: their epsilons add up.",
        ]
        match self.claim.neighbours:
            case Relation.ZERO_OUT:
                uncovered.append("How many clients there are, which is public.")
            case Relation.REPLACE:
                uncovered.append("That somebody takes part: only what their data are is hidden.")
        return uncovered

    @property
    def odds(self) -> list[dict[str, str]]:
        """What an attacker can find at most, by how many false alarms it puts up with."""
        if self.claim is None or not self.guaranteed:
            return []
        return [
            {
                "false alarms": name,
                "true cases found, at most": _share(power(self.claim, alarms)),
                "found by mere guessing": _share(alarms),
            }
            for name, alarms in ALARMS.items()
        ]

    @property
    def factor(self) -> str:
        """The definition in odds, "" where nothing is guaranteed."""
        if self.claim is None or not self.guaranteed:
            return ""
        odds = _odds(self.claim)
        times = f"{_up(odds, 3)} times" if odds < 1e6 else "more than a million times"
        more = f", plus delta {self.claim.delta:g}" if self.claim.delta else ""
        return (
            f"Whatever may be seen is at most {times} as likely in one of the two worlds as in the "
            f"other{more}."
        )

    @property
    def claim_text(self) -> str:
        """The claim in the field's own words."""
        return "nothing is claimed" if self.claim is None else str(self.claim)


def _odds(claim: PrivacyClaim) -> float:
    try:
        return math.exp(claim.epsilon)
    except OverflowError:
        return math.inf


def _share(share: float) -> str:
    """A share, never less than it is.

    >>> [_share(x) for x in (0.5, 0.73106, 0.99966, 0.9999999, 1.0)]
    ['50 in 100', '73.2 in 100', '99.97 in 100', '100 in 100', '100 in 100']
    """
    percent = 100 * share
    digits = 1 if percent < 99 else 2
    up = math.ceil(percent * 10**digits - 1e-9) / 10**digits
    return f"{up:g} in 100"


def _up(value: float, digits: int) -> str:
    """A number with so many digits, never less than it is."""
    if value >= 1e3:
        return f"{math.ceil(value):,}"
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return f"{math.ceil(value / unit - 1e-9) * unit:.4g}"
