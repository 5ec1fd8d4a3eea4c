"""What neighbouring data share, to the last bit: what follows from a record is in its own row.

One client or record changes. Cohorts, chunks, the rounding of other rows, and the reading of other
rows of a table stay as they are.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.privacy.clip import Clip
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.privacy.releases.sites import WHOLE, sites
from fedveil.runs.build import build, resolve_recipe
from fedveil.runs.recipe import load_recipe
from fedveil.training.gradients.per_example import ClippedExamples

CLIENTS, CUT_SHORT = 12, 5


class Halves:
    """A user's sampler that draws its order from the streams."""

    relation, assumption = fv.claims.Relation.ZERO_OUT, "turns are public"

    def check(self, population): ...

    def cohort(self, population, round, streams, counts=None):
        return np.sort(streams.generator("own", round).permutation(population)[: population // 2])

    def expected(self, population):
        return population / 2

    def event(self, release, population):
        return release

    def participation_share(self, population):
        return 1


def cohorts(sampler, change):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(CLIENTS, 4, 3)).astype(np.float32)
    x[CUT_SHORT] *= change
    triples = [(str(k), x[k], np.array([0, 1, 0, 1])) for k in range(CLIENTS)]
    data = fv.FederatedData.from_clients(triples, classes=2)
    task = fv.Task(nn.Linear(3, 2), fv.cross_entropy)
    budget = fv.releases.planned_for(fv.Budget(8.0, 1e-3))
    plan = fv.central(sampler, CLIENTS, fv.clips.Fixed(1.0), rounds=4, budget=budget)
    plan = fv.releases.with_secure_noise(plan, task.size, diagnostics=False)
    training = fv.Training(task, data, plan, fv.ClientSgd(fv.Batches(0, steps=1), lr=0.1), seed=3)
    return [plan.sampler.cohort(CLIENTS, r, training.streams).tolist() for r in range(1, 5)]


@pytest.mark.parametrize("sampler", [fv.samplers.RoundRobin(3), Halves()], ids=["ours", "own"])
def test_with_secure_noise_turns_follow_from_the_seed_and_not_from_records(sampler):
    assert cohorts(sampler, 1.0) == cohorts(sampler, 0.0) != [list(range(3))] * 4


@pytest.mark.parametrize("extra", [1, 400])
def test_with_secure_noise_the_recipe_that_is_stored_shows_no_number_of_records(extra):
    settings = {
        "name": "x",
        "rounds": 2,
        "data": {"name": "own"},
        "model": {"name": "own"},
        "sample": {"kind": "all"},
        "client": {"kind": "dp-sgd", "rate": 0.5, "steps": 200, "lr": 1.0, "nominal": 20},
        "clip": {"kind": "fixed", "value": 1.0},
        "noise": {"kind": "gaussian", "where": "training", "source": "secure"},
        "budget": {"epsilon": 8.0, "delta": 1e-4},
    }
    resolved = []
    for most in (44, 44 + extra):
        sizes = [10] * 29 + [most]
        triples = [
            (f"c{k}", np.ones((n, 60), np.float32), np.zeros(n, int)) for k, n in enumerate(sizes)
        ]
        data = fv.FederatedData.from_clients(triples, classes=5)
        torch.manual_seed(0)
        training = build(load_recipe(settings, {}), data=data, model=nn.Linear(60, 5))
        resolved.append(resolve_recipe(load_recipe(settings, {}), training))
    assert resolved[0] == resolved[1]


def test_a_row_is_rounded_alike_however_many_join():
    """256 rows of hardly any noise have no room in int32, 255 would: each is cut as of 256."""
    torch.manual_seed(0)
    module = nn.Linear(100, 10, bias=False)
    nn.init.zeros_(module.weight)
    task, clip, z = fv.Task(module, fv.cross_entropy), Clip(1.0), 1 / 6
    grid = GaussianMechanism(z).grid(z, task.size)
    examples = ClippedExamples(task, torch.randn(2, 100), torch.tensor([0, 1]))
    one, target = torch.randn(1, 100), torch.tensor([3])
    x, y = torch.cat([-one, one.repeat(255, 1)]), target.repeat(256)
    flat = task.parameters.clone()
    both, others, alone = (
        examples.sum_on_grid(flat, x[rows], y[rows], clip, grid)
        for rows in (slice(256), slice(1, 256), slice(1))
    )
    assert torch.equal(both - others, alone)
    assert float((both - others).norm()) <= clip.value


@pytest.mark.parametrize(
    "sampler", [fv.samplers.RoundRobin(1), fv.samplers.FixedSize(2), fv.samplers.Poisson(0.5)]
)
def test_noise_of_sites_counts_only_where_all_of_them_take_part(sampler):
    budget = fv.Budget(8.0, 1e-3)
    plan = sites(10, 1.0, records=500, rate=0.1, share=WHOLE, rounds=5, budget=budget)
    with pytest.raises(BadInput, match="not every site takes part"):
        replace(plan, sampler=sampler).check_lines()


PERSONS = {"north": ["ada", "ada", "bob"], "south": ["cy", "cy", "dee"]}


@pytest.mark.parametrize("persons", [PERSONS, list(PERSONS.values())])
def test_test_records_of_a_person_who_is_trained_on_are_not_held_out(persons):
    x = np.arange(12, dtype="float32").reshape(6, 2)
    y = np.array([0, 1, 0, 1, 0, 1])
    data = fv.FederatedData.from_clients(
        [("north", x[:3], y[:3]), ("south", x[3:], y[3:])],
        classes=2,
        persons=persons,
        test=(np.ones((2, 2), "float32"), np.array([0, 1])),
        test_owners=["ada", "eve"],
    )
    for one in (data, data.capped(2)):
        assert one.held_out_owners == 1
        assert "test records of the clients themselves" in one.test_assumptions[0]
        with pytest.raises(BadInput, match="test records are the clients' own"):
            one.check_secure()


@pytest.mark.parametrize("where", [True, False])
def test_tested_people_of_a_new_hospital_who_are_trained_on_elsewhere_are_not_held_out(where):
    ids = ["ada", "ada", "bob", "bob", "cy", "cy", "dee", "dee"]
    train = {"h": ["A"] * 4 + ["B"] * 4, "p": ids, "v": [0.1 * k for k in range(8)]}
    test = {"h": ["C"] * 4, "p": ["ada", "eve", "fay", "gus"], "v": [0.05, 0.15, 0.25, 0.35]}
    if not where:
        del test["h"]
    columns = {"v": {"low": 0, "high": 1}, "t": {"values": ["n", "y"]}}
    data = fv.FederatedData.from_table(
        {**train, "t": ["n", "y"] * 4},
        client="h",
        person="p",
        target="t",
        test={**test, "t": ["n", "y"] * 2},
        columns=columns,
    ).capped(2)
    assert data.test_of_clients
    with pytest.raises(BadInput, match="test records are the clients' own"):
        data.check_secure()


@pytest.mark.parametrize("odd", [1, True, 0.5])
def test_one_row_of_another_type_moves_no_other_row(odd):
    generator = np.random.default_rng(0)
    count = 63
    ages = generator.uniform(0, 100, count).round(2).tolist()
    smokes = [bool(bit) for bit in generator.integers(2, size=count)]
    well = [["no", "yes"][bit] for bit in generator.integers(2, size=count)]

    def places(ages, smokes, well):
        data = fv.FederatedData.from_table(
            {"age": ages, "smokes": smokes, "well": well},
            target="well",
            clients=3,
            test=0.2,
            columns={
                "age": {"low": 0, "high": 100},
                "smokes": {"low": 0, "high": 1},
                "well": {"values": ["no", "yes"]},
            },
        )
        spans = zip(data.offsets[:-1], data.offsets[1:], strict=True)
        return {round(float(x[0]), 5): k for k, (a, b) in enumerate(spans) for x in data.x[a:b]}

    more = places([*ages, 55.55], [*smokes, odd], [*well, "yes"])
    less = places(ages, smokes, well)
    assert less.items() <= more.items()
    assert len(more) <= len(less) + 1


def test_large_ids_keep_their_digits_beside_a_fraction():
    table = {
        "p": [2**60, 2**60 + 1, 5.0],
        "h": ["A", "A", "B"],
        "v": [0.1, 0.2, 0.3],
        "t": ["n", "y", "n"],
    }
    columns = {"v": {"low": 0, "high": 1}, "t": {"values": ["n", "y"]}}
    data = fv.FederatedData.from_table(table, client="h", person="p", target="t", columns=columns)
    assert data.people.tolist() == [2, 1]
