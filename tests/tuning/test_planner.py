"""Ranking options: by the clip, and by trying."""

import math
import tomllib

import pytest

from fedveil.base.errors import BadInput
from fedveil.runs.recipe import load_recipe, to_toml
from fedveil.tuning.recipe_grid import Space, load_cell_recipe
from fedveil.tuning.search import plan_by_training
from fedveil.tuning.theory_plan import plan_by_theory
from fedveil.tuning.trials import Laboratory, TrialOutcome

SMALL = ("data.clients=20", "sample.size=5", "engine.mode=vectorised")
SPACE = Space((1, 2, 4), (4, 8))


class Made(Laboratory):
    """Trials whose loss is made up; keeps what was asked for."""

    def __init__(self, loss):
        super().__init__(workers=1)
        self.loss, self.asked = loss, []

    def trial(self, prepared, repetitions):
        recipe = prepared.cell.recipe
        self.asked += [(recipe, repetition) for repetition in repetitions]
        return [TrialOutcome(recipe.rounds, {"loss": self.loss(recipe, r)}) for r in repetitions]


def far_from(steps, rounds):
    """A loss that is least there, larger with noise, and shifted by the repetition."""

    def loss(recipe, repetition):
        distance = abs(recipe.client.steps - steps) + abs(recipe.rounds - rounds)
        return distance + (1.0 if recipe.budget else 0.25) + repetition

    return loss


def planned(made, *, recipe="dp-fedavg", settings=SMALL, space=SPACE, repeat=20, **options):
    return plan_by_training(recipe, settings, space, made, repeat=repeat, **options)


def test_simulating_writes_the_winner_and_ranks_the_others():
    report = planned(Made(far_from(2, 4)))
    assert (report.options[0].steps, report.options[0].rounds) == (2, 4)
    assert len(report.options) == len(SPACE.pairs)
    recipe = tomllib.loads(report.recipe_toml)
    assert (recipe["client"]["steps"], recipe["rounds"]) == (2, 4)
    assert recipe["seed"] == load_recipe("dp-fedavg").seed + 20  # of none of the 20 repetitions
    assert report.least_values[2, 8] == min(report.least_values.values()) == report.options[0].value
    assert set(report.least_values) == {(e, e * rounds) for e, rounds in SPACE.pairs}
    assert report.ranked_by == "loss"
    assert "per client (replace, local trust" in report.options[0].privacy


def test_remarks_claim_no_more_than_was_tried():
    report = planned(Made(far_from(2, 4)))
    first, second, *_, last = report.options
    assert "repetitions" in first.remark
    assert "worse" not in first.remark
    assert second.remark.endswith("repetitions, worse (p = 0)")
    assert last.remark == "tried once"
    same = planned(Made(lambda recipe, repetition: float(repetition)))
    assert same.options[1].remark.endswith("repetitions, not clearly worse (p = 1)")


def test_why_compares_the_same_repetitions_with_and_without_noise():
    made = Made(far_from(2, 4))
    report = planned(made)
    assert report.reasons[0].startswith("the first, E = 2 in 4 rounds: noise of ")
    assert report.reasons[1].startswith("the best with fewer iterations, E = ")
    assert len(report.reasons) == 2
    quiet = sum(recipe.budget is None for recipe, _ in made.asked)
    paired = report.reasons[0].partition(", loss ")[2]
    with_it, without = (float(word) for word in paired.split() if word[0].isdigit())
    assert with_it - without == pytest.approx(0.75)
    trials = len(made.asked) - quiet
    assert f"{trials} trainings on these records" in report.warnings[-1]
    assert f"from {quiet} more trainings, come on top" in report.warnings[-1]


def test_the_cost_of_tuning_adds_up():
    made = Made(far_from(2, 4))
    report = planned(made, settings=(*SMALL, "budget.epsilon=3"))
    trials = sum(recipe.budget is not None for recipe, _ in made.asked)
    assert f"ranked by training, {trials} trials of 6 recipes" in report.title
    claim = "per client (replace, local trust, PURE, seeded noise)"
    assert f"add up to epsilon {3 * (trials + 1):.4g} at delta 0 {claim}" in report.warnings[-1]
    assert f"a later run's claim (epsilon 3 at delta 0 {claim}) does not" in report.warnings[-1]


def test_the_cost_of_tuning_as_published_is_told_strictly_too():
    made = Made(far_from(2, 4))
    report = planned(made, settings=(*SMALL, "budget.epsilon=3", "budget.as_published=true"))
    count = 1 + sum(recipe.budget is not None for recipe, _ in made.asked)
    assert f"add up to epsilon {3 * count:.4g} at delta 0 per record" in report.warnings[-1]
    assert "as published, not a guarantee); strictly epsilon" in report.warnings[-1]


def test_without_a_claim_the_choice_still_says_something():
    report = planned(Made(far_from(2, 4)), settings=(*SMALL, "budget.epsilon=inf"))
    assert "without noise, chose the recipe" in report.warnings[-1]
    assert report.options[0].privacy == "nothing claimed"


def test_bounds_and_rates_are_part_of_the_choice():
    space = Space((1,), (4,), clips=(1.0, 3.0), rates=(0.01, 0.02))
    made = Made(lambda recipe, r: abs(recipe.clip.value - 3.0) + recipe.client.lr)
    report = planned(made, space=space)
    assert report.options[0].choice == {"clip.value": "3", "client.lr": "0.01"}
    assert report.least_values == {(1, 4): report.options[0].value}


def test_an_option_that_diverges_does_not_win():
    def loss(recipe, repetition):
        return math.nan if recipe.client.steps == 4 else float(recipe.rounds)

    report = planned(Made(loss))
    assert report.options[0].steps == 2
    diverged, untried = report.options[-2:]
    assert (diverged.steps, diverged.value_text, diverged.rounds) == (4, "diverged (1 of 1)", 1)
    assert (untried.steps, untried.value_text, untried.rounds) == (4, "not tried", 2)
    assert untried.remark == "with fewer rounds the loss had risen already"
    assert report.least_values[4, 4] == math.inf
    assert (4, 8) not in report.least_values


def test_when_every_option_diverges_the_way_out_is_told():
    with pytest.raises(BadInput, match=r"every option diverged: raise budget\.epsilon, lower"):
        planned(Made(lambda recipe, repetition: math.nan))


def test_recipes_of_the_same_promise_are_compared_and_others_named(tmp_path):
    path = tmp_path / "central.toml"
    everyone = load_cell_recipe("central", ["sample.kind=all"])
    path.write_text(to_toml(everyone.model_dump()))
    made = Made(lambda recipe, r: recipe.rounds + (0.0 if recipe.name.endswith("sian") else 1.0))
    others = ("dp-fedavg-gaussian", str(path), "fedavg", "ldp-sgd", "ldp-fl")
    report = planned(made, against=others)
    assert len(report.options) == 2 * len(SPACE.pairs)
    assert {row.choice["recipe"] for row in report.options} == {"dp-fedavg", "dp-fedavg-gaussian"}
    assert report.options[0].choice["recipe"] == "dp-fedavg-gaussian"
    assert tomllib.loads(report.recipe_toml)["name"] == "dp-fedavg-gaussian"
    central, fedavg, ldp_sgd, ldp_fl, _ = report.warnings
    assert central == (
        f"{path} was default: it protects each client (zero-out neighbours) under central trust, "
        "the first each client (replace neighbours) under local trust"
    )
    assert fedavg.startswith("fedavg was default: it claims nothing")
    assert ldp_sgd.startswith("ldp-sgd was default: client.kind 'gradient' takes one step")
    assert ldp_fl.startswith("ldp-fl was default: ")
    assert {recipe.budget.epsilon for recipe, _ in made.asked if recipe.budget} == {20.0}


def test_a_recipe_to_compare_with_that_is_unknown():
    with pytest.raises(BadInput, match="recipe 'nothing' is unknown"):
        planned(Made(far_from(1, 1)), against=("nothing",))


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [("dp-fedavg", (*SMALL, "noise.multiplier=1.0", "budget.epsilon=inf")), ("ldp-fl", ())],
)
@pytest.mark.parametrize("plan", [planned, lambda made, recipe, settings: plan_by_theory(
    recipe, settings, SPACE, made)])  # fmt: skip
def test_noise_that_does_not_follow_from_a_budget_cannot_be_planned(recipe, settings, plan):
    with pytest.raises(BadInput, match="compared at one claim"):
        plan(Made(far_from(1, 1)), recipe=recipe, settings=settings)


def test_noise_in_training_is_planned_without_a_comparison():
    made = Made(lambda recipe, r: 1.0)
    settings = ["data.clients=10", "sample.kind=all", "client.rate=1.0"]
    report = planned(made, recipe="dp-sgd", settings=settings, space=Space((2,), (2,)), repeat=1)
    assert report.reasons == ["the first, E = 2 in 1 round: noise in every step of training"]
    assert len(made.asked) == 1
    assert report.options[0].noise_text == "in training"


def test_the_theory_ranks_by_its_bound():
    report = plan_by_theory("dp-fedavg", SMALL, SPACE, Laboratory())
    values = [row.value for row in report.options]
    assert values == sorted(values)
    assert len(values) == len(SPACE.pairs)
    recipe = tomllib.loads(report.recipe_toml)
    assert (recipe["client"]["steps"], recipe["rounds"]) == (
        report.options[0].steps,
        report.options[0].rounds,
    )
    assert report.reasons[0].startswith("z = 2: diverges")
    assert "without noise" in report.warnings[0]


def test_the_theory_sees_every_bound_and_rate():
    space = Space((2,), (60,), clips=(1.0, 30.0), rates=(0.01, 0.02))
    report = plan_by_theory("dp-fedavg", (*SMALL, "budget.epsilon=1"), space, Laboratory())
    clips = {
        (row.choice["clip.value"], row.choice["client.lr"]): row.value for row in report.options
    }
    assert len(set(clips.values())) == 4
    assert clips["1", "0.01"] < clips["30", "0.01"]
    assert clips["1", "0.02"] < clips["30", "0.02"]


def test_the_theory_says_when_it_says_nothing():
    report = plan_by_theory("dp-fedavg", SMALL, SPACE, Laboratory())
    assert report.reasons[-1] == "with E = 1 the bound is least after 1 round"
    assert report.warnings[-1].endswith("simulate (--simulate)")


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("dp-fedavg", (), r"strongly convex, smooth losses; simulate instead \(--simulate\)"),
        ("central", ("sample.kind=all",), r"counts local steps: .* or simulate \(--simulate\)"),
        ("fedavg", ("client.epochs=none", "client.steps=2", "client.proximal=0.1"),
         "for plain steps: leave out client.momentum"),
        ("dp-fedavg", (*SMALL, "client.schedule=linear"), "for plain steps: .* client.schedule"),
        ("dp-fedavg", (*SMALL, "clip.each=update"), "clip.each = 'gradient': simulate instead"),
        ("dp-fedavg", (*SMALL, "budget.epsilon=none", "budget.epsilons=[1.0, 2.0]"),
         "one epsilon for all"),
    ],
)  # fmt: skip
def test_what_the_theory_is_not_about(recipe, settings, message):
    with pytest.raises(BadInput, match=message):
        plan_by_theory(recipe, settings, SPACE, Laboratory())
