"""The one row: the best of each attack, beside the claim it is about."""

from dataclasses import dataclass, replace

import pytest

from fedveil.audit.audit_command import COLUMNS, NOTHING, summary
from fedveil.audit.findings import Finding, Leak, Measure
from fedveil.privacy.accounting.claims import (
    Accountant,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)


@dataclass(frozen=True)
class Bound:
    value: float
    draws: int = 10
    bound_name = "counting"

    def lower_bound(self, alpha: float) -> float:
        return self.value


def claim(epsilon=8.0, trust=Trust.CENTRAL):
    return PrivacyClaim(
        epsilon=epsilon,
        delta=1e-5,
        unit=Unit.CLIENT,
        neighbours=Relation.ZERO_OUT,
        trust=trust,
        accountant=Accountant.PLD,
        noise=NoiseSource.SEEDED,
    )


def leak(attack, beside, **measures):
    return Leak(attack, "something", tuple(Measure(n, v) for n, v in measures.items()), beside)


def test_the_best_of_each_attack_is_told():
    leaks = [
        leak("membership", claim(), **{"AUC": 0.6, "TPR at 0.1 % FPR": 0.02}),
        leak("membership", claim(), **{"AUC": 0.7, "TPR at 0.1 % FPR": 0.01}),
        leak("inversion", claim(), PSNR=12.0, SSIM=0.5),
    ]
    row = summary([], leaks, claim())
    assert tuple(row) == COLUMNS
    assert row["membership AUC"] == "0.7"
    assert row["membership TPR"] == "0.02"
    assert row["inversion PSNR"] == "12 dB"
    assert row["property AUC"] == row["white-box AUC"] == row["at least (95 %)"] == NOTHING
    assert row["claim"] == "epsilon 8 at delta 1e-05 per client (zero-out, central trust)"


def test_an_attacker_that_the_claim_trusts_is_left_out():
    server, client = leak("white-box", None, AUC=0.9), leak("white-box", claim(), AUC=0.55)
    assert summary([], [server, client], claim())["white-box AUC"] == "0.55"
    assert summary([], [server], claim())["white-box AUC"] == "0.9"
    nobody = leak("white-box", None, AUC=0.95)
    row = summary([], [nobody, server], None)
    assert (row["white-box AUC"], row["claim"]) == ("0.95", "nothing claimed")


def test_the_empirical_epsilon_is_about_the_whole_claim():
    """A bound on one report of many is a bound on another claim."""
    findings = [
        Finding("randomiser", "one report", claim(3.0), Bound(2.9)),
        Finding("canaries", "the final model", claim(), Bound(1.5)),
        Finding("canaries", "all rounds", claim(), Bound(2.25)),
    ]
    assert summary(findings, [], claim())["at least (95 %)"] == "2.25 (canaries)"
    assert summary(findings[:1], [], claim())["at least (95 %)"] == NOTHING


@pytest.mark.parametrize(
    "other",
    [
        {"epsilon": 14.0},  # of a client that is known to take part, whom nothing amplifies
        {"neighbours": Relation.ADD_REMOVE},
        {"unit": Unit.RECORD},
        {"trust": Trust.LOCAL},
        {"delta": 1e-3},
    ],
)
def test_a_bound_on_another_claim_does_not_stand_beside_this_one(other):
    findings = [
        Finding("randomiser", "2 sums", replace(claim(), **other), Bound(7.5)),
        Finding("canaries", "all rounds", claim(), Bound(2.25)),
    ]
    assert summary(findings, [], claim())["at least (95 %)"] == "2.25 (canaries)"
    assert summary(findings, [], None)["at least (95 %)"] == NOTHING


def test_the_best_of_several_bounds_shares_the_confidence():
    class Sure(Bound):
        def lower_bound(self, alpha: float) -> float:
            return self.value if alpha >= 0.025 else 0.0

    found = [Finding("canaries", str(k), claim(), Sure(1.0 + k)) for k in range(3)]
    assert summary(found[:2], [], claim())["at least (95 %)"] == "2 (canaries)"
    assert summary(found, [], claim())["at least (95 %)"] == "0"


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_bound_is_never_rounded_up(value):
    found = [Finding("canaries", "all rounds", claim(), Bound(value + 0.123456))]
    told = summary(found, [], claim())["at least (95 %)"]
    assert float(told.split()[0]) <= value + 0.123456
