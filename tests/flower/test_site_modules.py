"""A module that remembers what it saw is harmless or refused at a site as well."""

import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.flower import site as sites
from tests.contracts import hiding_places
from tests.contracts.hiding_places import HIDING_PLACES, LATE, OTHERS
from tests.contracts.zoo import CLASSES, FEATURES
from tests.flower.sites import CENTRAL, DP_SGD, POLICY, Server, is_answer, open_site

PLACES = {**HIDING_PLACES, **OTHERS}
FIRST = next(iter(PLACES))
TWICE = ("custom_operator", "new_overload")
"""What a process cannot make twice."""

STEPS = LATE // 2 + 5
RECIPES = {
    "central": {**CENTRAL, "client": {"kind": "sgd", "steps": STEPS, "lr": 0.1}},
    "dp-sgd": {
        **DP_SGD,
        "client": {"kind": "dp-sgd", "rate": 0.5, "steps": STEPS, "lr": 0.1},
        "noise": {**DP_SGD["noise"], "multiplier": 60.0},
    },
}


def records():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, FEATURES, generator=generator).numpy()
    y = torch.randint(CLASSES, (20,), generator=generator).numpy()
    return sites.FederatedData.from_clients([("own", x, y)], classes=CLASSES)


def second_answer(folder, recipe, name, *, answered_before):
    """What a site reports in its second round, or None if the module or the round is refused."""
    model = {"path": f"{hiding_places.__file__}:{PLACES[name].__name__}"}
    keys = {"allow_code": True, "data": records(), "policy": {**POLICY, "seeded": True}}
    try:
        site = open_site(folder, {**RECIPES[recipe], "model": model}, **keys)
    except BadInput:
        return None
    server = Server(site)
    if answered_before:
        server.answer(1, params=3.0 * torch.ones_like(site.training.start().params))
    answer = server.answer(2)
    return answer.report if is_answer(answer) else None


@pytest.fixture(autouse=True)
def _one_seed(monkeypatch):
    monkeypatch.setattr(sites.secrets, "randbits", lambda bits: 7)


QUICK = (FIRST, "mapped_file")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PLACES],
)
def test_a_report_does_not_depend_on_the_reports_before(tmp_path, name, recipe):
    new, old = (
        second_answer(tmp_path / str(before), recipe, name, answered_before=before)
        for before in (False, True)
    )
    if name in TWICE and None in (new, old):
        return
    assert new is old is None or torch.equal(new, old)


def test_a_site_that_ran_the_module_s_own_code_would_remember(tmp_path, monkeypatch):
    """So the test above has something to find."""
    found = []
    opened = sites.Site.__init__

    def as_it_is(self, *args):
        opened(self, *args)
        self.training.task.compute_in_forks("")

    monkeypatch.setattr(sites.Site, "__init__", as_it_is)
    for before in (False, True):
        found.append(
            second_answer(tmp_path / str(before), "central", FIRST, answered_before=before)
        )
    assert not torch.equal(*found)
