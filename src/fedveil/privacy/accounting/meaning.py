"""The meaning of a claim: a sentence for people who have never heard of epsilon, and odds.

(epsilon, delta)-differential privacy bounds every test between two worlds that differ in one unit.
At a false-alarm rate of a, the power of a test is at most

    min(e^epsilon a + delta,  1 - e^-epsilon (1 - delta - a),  1),

and its share of right answers, when both worlds are equally likely beforehand, at most
(e^epsilon + delta) / (1 + e^epsilon) (Wasserman and Zhou 2010; Kairouz, Oh and Viswanath 2015).
Numbers are rounded up: a sentence never promises more than the claim.
"""

import math
import tomllib
from collections.abc import Sequence
from enum import StrEnum
from operator import attrgetter
from pathlib import Path

from fedveil.privacy.accounting.claims import (
    TRUSTED_SERVER,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)

ALARMS = {"1 in 1,000": 1e-3, "1 in 100": 1e-2, "1 in 10": 1e-1}
"""The false-alarm rates at which a report states the power."""


class Strength(StrEnum):
    """How strong the promise of a claim is, in the worst case."""

    NONE = "none"
    NOTHING = "next to nothing"
    WEAK = "weak"
    MODERATE = "moderate"
    STRONG = "strong"


_STRENGTHS = {Strength.NOTHING: 0.999, Strength.WEAK: 0.95, Strength.MODERATE: 0.625}
"""The least share of right guesses of each, from the weakest on."""

_WORDS = tomllib.loads(Path(__file__).with_name("meaning.toml").read_text(encoding="utf-8"))
_PROMISES = {Strength(name): text for name, text in _WORDS["promises"].items()}
_SEES = {Trust(name): text for name, text in _WORDS["sees"].items()}
_TRUSTED = {Trust(name): text for name, text in _WORDS["trusted"].items()}
_UNITS = {Unit(name): text for name, text in _WORDS["units"].items()}
_WORLDS = {
    (Unit(unit), Relation(relation)): text
    for unit, texts in _WORDS["worlds"].items()
    for relation, text in texts.items()
}
_WORLDS_OF_SEVERAL = {Relation(name): text for name, text in _WORDS["worlds_of_several"].items()}

_UNCOVERED = (
    "What is true of people in general, and would be learnt from others as well.",
    "Other runs on the same data, trials included: their epsilons add up.",
)
_UNCOVERED_UNDER = {
    Relation.ADD_REMOVE: (),
    Relation.ZERO_OUT: ("How many clients there are, which is public.",),
    Relation.REPLACE: ("That somebody takes part: only what their data are is hidden.",),
}

SEVERAL = (1, 2, 4, 8)
"""Numbers of units of one person for which a report has the epsilon."""

NOTHING_CLAIMED = (
    "Nothing is promised. Whoever sees this model may learn anything about anybody whose data it "
    "was trained on."
)


def counting(claims: Sequence[PrivacyClaim]) -> PrivacyClaim | None:
    """The headline claim: the first that is a guarantee, else the first. None without any.

    Whoever shows one number of several claims shows this one. Claims with a condition are left out;
    a guarantee is not as published.
    """
    whole = [claim for claim in claims if not claim.condition]
    return next((c for c in whole if not c.as_published), whole[0] if whole else None)


def budgeted(claims: Sequence[PrivacyClaim]) -> PrivacyClaim | None:
    """The claim of the line that the budget limits: the first without a condition, or None.

    It is the headline claim, but for recipes as published: there the paper's formula is limited.
    """
    return next((claim for claim in claims if not claim.condition), None)


def smaller(claims: Sequence[PrivacyClaim]) -> PrivacyClaim | None:
    """The conditional claim beside the headline claim, which has the same terms. None without one.

    Its epsilon is smaller.
    """
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
    """The largest share of true cases found by a test with the share `alarms` of false alarms.

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


class Meaning:
    """What a run's claims mean, in words for people who are no specialists.

    Attributes:
        claim: The headline claim, None if nothing is claimed.
        published: A paper's formula that the budget limited instead, None if there is none.
        smaller: The conditional claim that is smaller than the headline claim, or None.
        promise: The headline claim if it is a guarantee, otherwise None.
        strength: How strong the promise is, by the share of right guesses that it permits.
        worth: That strength in a sentence, "" without a promise.
        unit: Whom or what the claim is about.
        trusted: Whom one has to trust for the claim to hold.
        worlds: The two worlds between which an attacker has to tell, "" without a claim.
        conditions: The conditions under which the claim holds. Whom one has to trust comes first.
        uncovered: Sentences on what the claim does not cover, empty without a claim.
        several_unknown: Why `several` has no epsilons, "" where it has or none are needed.
    """

    def __init__(self, claims: Sequence[PrivacyClaim]) -> None:
        """Compute the attributes from a run's claims. Without claims, nothing is promised."""
        claim = self.claim = counting(claims)
        self.smaller, self.published, first = smaller(claims), None, budgeted(claims)
        if first is not None and first.as_published:
            self.published = next((c for c in claims if c.as_published and c is not claim), None)
        self.promise, self.strength, self.worlds = claim, Strength.NONE, ""
        if claim is None:
            self.conditions, self.uncovered, self.unit = list[str](), list[str](), "Nobody."
            self.trusted = "Everybody who takes part, and everybody who sees the model."
        else:
            self.unit, self.trusted = _UNITS[claim.unit], _TRUSTED[claim.trust]
            self.worlds = _WORLDS[claim.unit, claim.neighbours]
            if claim.units > 1:
                these = claim.units_text
                if claim.unit is Unit.PERSON:
                    these = f"the records of {these}"
                self.worlds = _WORLDS_OF_SEVERAL[claim.neighbours].format(these=these)
            if claim.as_published or not claim.vouched:
                self.promise = None
            assumptions = (a for a in claim.assumptions if a != TRUSTED_SERVER)
            self.conditions = [self.trusted, *assumptions]
            self.uncovered = [*_UNCOVERED, *_UNCOVERED_UNDER[claim.neighbours]]
        if self.promise is not None:
            share, self.strength = right_guesses(self.promise), Strength.STRONG
            for strength, least in reversed(_STRENGTHS.items()):
                if share >= least:
                    self.strength = strength
        self.worth = _PROMISES.get(self.strength, "")
        self._of_one_unit, self.several_unknown = self.promise, ""
        if claim is not None and (claim.unit is Unit.WEIGHT or claim.units > 1):
            self._of_one_unit = None  # nobody has several such units
        one = self._of_one_unit
        if one is not None and one.composed is None and one.delta:
            several = f"with several {one.unit}s"
            if one.unit is Unit.PERSON:
                several = "at several clients"
            self.several_unknown = (
                f"The epsilon of somebody {several} is larger, and cannot be computed: "
                "the claim does not record what was composed."
            )

    @property
    def sentence(self) -> str:
        """The claim in one or two sentences, or a sentence that nothing is promised."""
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
        elif claim.unit is Unit.PERSON:
            rest = "the records of everyone else"
        share = _share(right_guesses(claim))
        most = f"and be right {share} times at most; tossing a coin is right 50 in 100 times"
        if share == _share(1.0):
            most = "and may be right every time, as far as this claim goes"
        return f"{_SEES[claim.trust]} and knows {rest}, can guess {self.worlds} {most}.{whose}"

    @property
    def warnings(self) -> list[str]:
        """Sentences that must stand beside `sentence`, [] if there are none.

        They are on seeded noise, on a conditional claim, on a person at two clients, and on a
        paper's formula.
        """
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
        one = self._of_one_unit
        if one is not None and one.unit is Unit.PERSON and not self.several_unknown:
            warnings.append(
                "Somebody with records at two clients counts as two persons: "
                f"{one.for_units(2).short}."
            )
        if self.published is not None:
            warnings.append(
                f"The paper's own formula comes to {self.published.short}. That is how its "
                "authors count, and it is not a guarantee."
            )
        return warnings

    @property
    def units_name(self) -> str:
        """What the numbers in the first column of `several` count, "" without a claim."""
        if self.claim is None:
            return ""
        unit = self.claim.unit
        return "clients that have one person" if unit is Unit.PERSON else f"{unit}s of one person"

    def several(self) -> list[dict[str, str]]:
        """Table rows with the epsilon of a person with 1, 2, 4 or 8 units, at the claim's delta.

        The keys of a row are `units_name`, "epsilon" and "right guesses at most". [] if nothing is
        promised or they cannot be computed. Computing them may take a second.
        """
        claim = self._of_one_unit
        if claim is None or self.several_unknown:
            return []
        rows = []
        for units in SEVERAL:
            more = claim.for_units(units)
            share = _share(right_guesses(more)) if more.vouched else "no bound"
            row = {self.units_name: f"{units}", "epsilon": more.rounded_epsilon}
            rows.append({**row, "right guesses at most": share})
        return rows

    @property
    def odds(self) -> list[dict[str, str]]:
        """Table rows with the largest power of an attack at each of `ALARMS`, [] without a promise.

        The keys of a row are "false alarms", "true cases found, at most" and "found by mere
        guessing".
        """
        if self.promise is None:
            return []
        return [
            {
                "false alarms": name,
                "true cases found, at most": _share(power(self.promise, alarms)),
                "found by mere guessing": _share(alarms),
            }
            for name, alarms in ALARMS.items()
        ]

    @property
    def factor(self) -> str:
        """A sentence with the factor e^epsilon, rounded up, and delta. "" if `promise` is None.

        From a million on, the factor is "more than a million times".
        """
        if self.promise is None:
            return ""
        odds, delta = _odds(self.promise), self.promise.delta
        if odds >= 1e6:
            times = "can be more than a million times"
        elif odds >= 1e3:
            times = f"is at most {math.ceil(odds):,} times"
        else:
            unit = 10.0 ** (math.floor(math.log10(odds)) - 2)  # three digits, rounded up
            times = f"is at most {math.ceil(odds / unit - 1e-9) * unit:.4g} times"
        more = f", plus delta {delta:g}" if delta else ""
        return (
            f"Whatever may be seen {times} as likely in one of the two worlds as in the "
            f"other{more}."
        )


def _odds(claim: PrivacyClaim) -> float:
    """e^epsilon of the claim, infinite beyond floating point."""
    try:
        return math.exp(claim.epsilon)
    except OverflowError:
        return math.inf


def _share(share: float) -> str:
    """A share from 0 to 1 as the text "x in 100", rounded up.

    >>> [_share(x) for x in (0.5, 0.73106, 0.99966, 0.9999999, 1.0)]
    ['50 in 100', '73.2 in 100', '99.97 in 100', '100 in 100', '100 in 100']
    """
    percent = 100 * share
    digits = 1 if percent < 99 else 2
    up = math.ceil(percent * 10**digits - 1e-9) / 10**digits
    return f"{up:g} in 100"
