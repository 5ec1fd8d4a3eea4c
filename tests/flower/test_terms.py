"""What a plan means for one site: whose turns are charged, how often, on which line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedveil.base.errors import BadInput
from fedveil.flower.policy import terms_of
from fedveil.flower.site import Site
from fedveil.privacy.releases.client_noise import ClientNoise
from tests.flower.sites import CENTRAL, LOCAL, POLICY, QUANTILE, Server, charges, open_site

OPEN = {**POLICY, "epsilon": {"client": 1000.0}, "delta": 0.1, "seeded": True}


def opened(folder: Path, changes: dict[str, Any], **keys: Any) -> Site:
    return open_site(folder, {**LOCAL, **changes}, OPEN, **keys)


@pytest.mark.parametrize(
    ("sample", "turns"),
    [
        ({"kind": "all"}, 6),
        ({"kind": "round-robin", "size": 1}, 2),
        ({"kind": "fixed", "size": 1}, 6),
        ({"kind": "fixed", "size": 1, "max_participations": 3}, 3),
        ({"kind": "poisson", "rate": 0.5}, 6),
    ],
    ids=lambda value: value.get("kind") if isinstance(value, dict) else None,
)
def test_a_site_that_randomises_is_charged_for_its_own_turns(
    tmp_path: Path, sample: dict[str, Any], turns: int
) -> None:
    site = opened(tmp_path, {"sample": sample, "rounds": 6})
    terms = site.terms
    assert (terms.planned_turns, terms.permitted_turns, terms.at_once) == (turns, turns, False)
    assert terms.costs[0].epsilon == site.plan.claims(6)[0].epsilon <= 6.0
    server = Server(site)
    server.answer(3)
    server.answer(5)
    assert charges(site) == 2


@pytest.mark.parametrize(
    ("sample", "at_once", "turns"),
    [
        ({"kind": "all"}, False, 4),
        ({"kind": "round-robin", "size": 1}, False, 2),
        ({"kind": "poisson", "rate": 0.5}, True, 4),
        ({"kind": "poisson", "rate": 1.0}, False, 4),
    ],
)
def test_a_secret_cohort_concerns_a_site_in_every_round(
    tmp_path: Path, sample: dict[str, Any], at_once: bool, turns: int
) -> None:
    noise = {"kind": "gaussian", "where": "server", "source": "secure"}
    site = open_site(tmp_path, {**CENTRAL, "sample": sample, "noise": noise}, OPEN)
    assert (site.terms.at_once, site.terms.permitted_turns) == (at_once, turns)
    Server(site).answer(2)
    assert charges(site) == (turns if at_once else 1)


def test_a_site_has_the_noise_and_the_line_of_its_own_group(tmp_path: Path) -> None:
    groups = {"epsilons": [4.0, 2.0, 1.0], "delta": 1e-5}
    sites = [opened(tmp_path / str(k), {"budget": groups}, number=k) for k in range(3)]
    costs = [site.terms.costs for site in sites]
    assert all(len(cost) == 1 for cost in costs)
    assert sorted(round(cost[0].epsilon, 1) for cost in costs) == [1.0, 2.0, 4.0]
    for number, site in enumerate(sites):
        (line,) = site.terms.charged_lines
        assert line.event.multiplier == site.plan.release.multipliers[number]  # type: ignore[union-attr]
    with pytest.raises(BadInput, match="number"):
        opened(tmp_path / "nobody", {"budget": groups})


def test_noise_is_that_of_the_site_s_own_number(tmp_path: Path) -> None:
    """Of 15 normals, 1.65 million times as long or short has no chance worth naming."""
    groups = {"epsilons": [40.0, 4e-5], "delta": 1e-5}
    reports = []
    for k in range(3):
        site = opened(
            tmp_path / str(k),
            {"budget": groups, "noise": {**LOCAL["noise"], "source": "seeded"}},
            number=k,
        )
        reports.append((site.terms.costs[0].epsilon, float(Server(site).answer().report.norm())))
    loud = [norm for epsilon, norm in reports if epsilon < 1]
    quiet = [norm for epsilon, norm in reports if epsilon > 1]
    assert len(loud) * len(quiet) == 2
    assert min(loud) > 1000 * max(quiet)


def test_a_plan_with_no_line_about_the_site_is_refused(tmp_path: Path) -> None:
    """Else it would answer, and be charged for nothing."""
    site = opened(tmp_path, {"budget": {"epsilons": [4.0, 2.0], "delta": 1e-5}}, number=0)
    release = site.plan.release
    assert isinstance(release, ClientNoise)
    other = replace(release, multipliers=2 * release.multipliers)  # type: ignore[operator]
    with pytest.raises(BadInput, match="no line of the plan is about this site"):
        terms_of(replace(site.plan, release=other), 0, 0)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({**QUANTILE, "clip": {"kind": "quantile", "value": 0.5, "bit_noise": 5.0}}, "curator"),
        (
            {
                **LOCAL,
                "noise": {"kind": "gaussian", "where": "client"},
                "budget": {"epsilon": 6.0, "delta": 1e-5, "as_published": True},
            },
            "as_published",
        ),
        (
            {**LOCAL, "attack": {"kind": "pixel", "target": 1}},
            "attack",
        ),
    ],
)
def test_what_no_site_can_take_part_in_is_refused(
    tmp_path: Path, recipe: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        open_site(tmp_path, recipe, OPEN)


def test_a_quantile_clip_under_central_trust_sends_its_bit_to_the_server(tmp_path: Path) -> None:
    clip = {"kind": "quantile", "value": 0.5, "bit_noise": 5.0}
    site = open_site(tmp_path, {**CENTRAL, "clip": clip}, OPEN)
    assert Server(site).answer().watched.abs().tolist() == [0.5]
