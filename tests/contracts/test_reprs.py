"""What objects show of themselves: one short line, no arrays, and nothing that is private."""

import math
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.data.load import load_records
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe, shipped_recipes

SMALL = ("rounds=2", "engine.workers=1", "engine.mode=looped")
LONG = {
    "as published": ("dp-fedavg", ("budget.as_published=true",)),
    "groups with a curator": (
        "ldp-sgd",
        ("clip.kind=quantile", "clip.value=1", "budget.epsilon=inf", "budget.epsilons=[100, 200]"),
    ),
    **{recipe["name"]: (recipe["name"], ()) for recipe in shipped_recipes()},
}


def line(value):
    text = repr(value)
    assert len(text) < 200, text
    assert "\n" not in text
    for word in ("tensor", "array", "object at 0x", "dtype", "/tmp"):
        assert word not in text
    assert str(text).startswith(f"{type(value).__name__}(")
    return text


@pytest.mark.parametrize("name", LONG)
def test_trainings_and_their_parts_have_one_short_line(name):
    recipe, settings = LONG[name]
    training = build(load_recipe(recipe, ("engine.workers=1", *settings)))
    shown, plan = line(training), line(training.plan)
    promise = training.plan.promise
    for text in (shown, plan):
        assert f"{training.data.clients:,} clients, {training.plan.rounds} rounds" in text
        assert (promise is None) is text.endswith(", no claim)")
        assert promise is None or text.endswith(f" {promise.terms})")
    assert type(training.work).__name__ in shown
    assert f"{training.task.size} parameters" in shown
    assert type(training.plan.release).__name__ in plan
    assert type(training.plan.sampler).__name__ in plan
    assert line(training.task).startswith("Task(Sequential, ")
    assert f"{training.data.clients:,} clients, " in line(training.data)


def test_a_budget_is_shown_with_what_it_means():
    plan = build(load_recipe("central", SMALL)).plan
    assert line(plan) == (
        "PrivacyPlan(100 clients, 2 rounds, Poisson, Fixed, CentralNoise, at most epsilon 8 at "
        "delta 1e-05 per client (zero-out, central trust))"
    )


def test_data_tell_their_sizes():
    data = fv.FederatedData.from_clients(
        [("ada", [[0.0, 1.0]] * 1200, [0, 1] * 600), ("bob", [[2.0, 0.0]], [1])],
        test=([[1.0, 1.0]], [1]),
        classes=2,
    )
    records = "1,201 records of shape (2,), 1 for testing, 2 labels"
    assert line(data) == f"FederatedData(2 clients, {records})"
    assert line(load_records("diabetes")) == (
        "Records(diabetes, 353 records of shape (10,), 89 for testing, a number to predict)"
    )


class Loss:
    def __call__(self, outputs, targets):
        return fv.models.squared_error(outputs, targets)


def test_tasks_name_module_and_loss():
    assert line(fv.Task(nn.Linear(1000, 1), fv.models.squared_error)) == (
        "Task(Linear, 1,001 parameters, loss squared_error)"
    )
    assert line(fv.Task(nn.Linear(2, 1), Loss())) == "Task(Linear, 3 parameters, loss Loss)"


def results(*settings):
    return list(fv.train(build(load_recipe("central", (*SMALL, *settings)))))


def test_results_tell_round_metrics_and_claim():
    first, last = results("evaluate.every=2")
    assert line(first) == f"RoundResult(round 1, {first.claim.short})"
    measured = f"loss {last.metrics['loss']:.4g}, accuracy {last.metrics['accuracy']:.4g}"
    assert line(last) == f"RoundResult(round 2, {measured}, {last.claim.short})"
    assert line(replace(last, metrics={}, quoted=lambda: None)) == "RoundResult(round 2, no claim)"


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_results_show_nothing_that_is_computed_from_private_data(source):
    for result in results(f"noise.source={source}"):
        marked = replace(
            result, clients=71717, clipped=0.62626, snr=53.535, refused=(84848,), seconds=9.4949
        )
        assert line(marked) == line(result)
        other = replace(marked.state, params=torch.full_like(result.state.params, 3.3))
        assert line(replace(marked, state=other)) == line(result)


def claim(**changes):
    settings = {
        "epsilon": 1.5,
        "delta": 1e-5,
        "unit": fv.claims.Unit.RECORD,
        "neighbours": fv.claims.Relation.REPLACE,
        "trust": fv.claims.Trust.LOCAL,
        "accountant": fv.claims.Accountant.RDP,
        "noise": fv.claims.NoiseSource.SECURE,
        "assumptions": ("a < b & c", "<script>alert('x')</script>"),
    }
    return fv.PrivacyClaim(**{**settings, **changes})


def test_claims_show_what_they_say():
    for one in (claim(), claim(as_published=True, holds_for="the worst client", vouched=False)):
        assert line(one) == f"PrivacyClaim({one})"


class Cells(HTMLParser):
    """The cells of a table by their headings, and the items of its list."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows, self.items, self._open = [], {}, [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        assert not attributes
        self.tags.append(tag)
        self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1] == "th":
            self._heading = data
        elif self._open[-1] == "td":
            self.rows[self._heading] = data
        else:
            assert self._open[-1] == "li"
            self.items.append(data)


def test_claims_are_tables_in_notebooks():
    found = Cells(claim()._repr_html_())
    assert found.rows == {
        "epsilon": "1.5",
        "delta": "1e-05",
        "unit": "record",
        "neighbours": "replace",
        "trust": "local",
        "accountant": "RDP",
        "noise": "secure",
        "holds for": "everyone",
        "covers": "updates",
    }
    assert found.items == ["a < b & c", "<script>alert('x')</script>"]
    assert set(found.tags) == {"table", "tr", "th", "td", "ul", "li"}


def test_tables_escape_what_others_wrote():
    text = claim(holds_for="<b>all</b>", covers="<i>bits</i>")._repr_html_()
    assert not any(tag in text for tag in ("<script", "<b>", "<i>"))
    assert Cells(text).rows["holds for"] == "<b>all</b>"


def test_tables_say_what_is_no_guarantee():
    published = Cells(claim(as_published=True, epsilon=math.inf, assumptions=())._repr_html_())
    assert published.rows["as published"] == "not a guarantee"
    assert published.rows["epsilon"] == "infinity"
    assert published.items == []
    assert "ul" not in published.tags
    unsure = Cells(claim(vouched=False)._repr_html_())
    assert unsure.rows["epsilon"] == "not vouched for, about 1.5"
