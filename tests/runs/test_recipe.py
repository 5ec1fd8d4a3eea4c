"""Recipes: read strictly, overridden key by key, refused on one line."""

import math
import tomllib

import pytest

from fedveil.base.errors import BadInput
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe, shipped_recipes, to_toml
from fedveil.runs.run import Run
from fedveil.runs.sections.noise_section import GaussianSection, NoNoiseSection

NAMES = [recipe["name"] for recipe in shipped_recipes()]
CLAIMED = {"central", "dp-fedavg", "dp-fedavg-gaussian", "ldp-fl", "ldp-sgd", "dp-sgd"}
CLAIMED |= {"people", "priv-unit", "sites"}
SHIPPED = CLAIMED | {"fedavg", "fedsgd", "norm-bound", "weak-dp"}


def test_shipped_recipes_say_what_they_protect_and_whose_they_are():
    assert set(NAMES) == SHIPPED
    assert len(NAMES) == len(SHIPPED)
    for recipe in shipped_recipes():
        assert set(recipe) == {"name", "protects", "paper"}
        assert all(recipe.values())


@pytest.mark.parametrize("name", NAMES)
def test_shipped_recipes_carry_their_own_name(name):
    assert load_recipe(name).name == name


@pytest.mark.parametrize("name", NAMES)
def test_shipped_recipes_survive_writing_and_reading(name, tmp_path):
    recipe = load_recipe(name)
    path = tmp_path / "again.toml"
    path.write_text(to_toml(recipe.model_dump()))
    assert load_recipe(str(path)) == recipe


def test_overrides_are_toml_values_or_strings():
    recipe = load_recipe(
        "central",
        [
            "rounds=7",
            "client.lr=0.25",
            "data.name=mnist",
            'model.name="mlp"',
            "model.hidden=[5, 6]",
        ],
    )
    assert recipe.rounds == 7
    assert recipe.client.lr == 0.25
    assert (recipe.data.name, recipe.model.name) == ("mnist", "mlp")
    assert recipe.model.hidden == [5, 6]


def test_spaces_around_an_override_are_ignored():
    assert load_recipe("central", [" rounds = 7 "]).rounds == 7


def test_the_last_override_counts():
    assert load_recipe("central", ["rounds=7", "rounds=8"]).rounds == 8


def test_a_whole_number_will_do_where_a_number_is_needed():
    assert load_recipe("central", ["client.lr=2"]).client.lr == 2.0


def test_setting_a_kind_starts_the_section_anew():
    recipe = load_recipe("central", ["sample.kind=fixed", "sample.size=5"])
    assert recipe.sample.model_dump() == {
        "kind": "fixed",
        "size": 5,
        "max_participations": None,
    }


def test_the_order_of_overrides_of_one_section_does_not_matter():
    settings = ["sample.size=5", "sample.kind=fixed"]
    assert load_recipe("central", settings) == load_recipe("central", settings[::-1])


def test_a_kind_without_its_keys_names_what_is_missing():
    with pytest.raises(BadInput, match=r"sample.size is missing for kind 'fixed'"):
        load_recipe("central", ["sample.kind=fixed"])


def test_none_leaves_a_section_out():
    recipe = load_recipe("central", ["budget=none", "noise=none", "clip=none"])
    assert recipe.budget is None
    assert recipe.clip is None
    assert isinstance(recipe.noise, NoNoiseSection)


def test_an_override_may_add_a_section():
    recipe = load_recipe("fedavg", ["clip.kind=fixed", "clip.value=1.0", "evaluate.every=5"])
    assert recipe.clip.value == 1.0
    assert recipe.evaluate.every == 5


def test_the_noise_is_left_to_the_budget_when_no_multiplier_is_given():
    noise = load_recipe("central").noise
    assert isinstance(noise, GaussianSection)
    assert noise.multiplier is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("color=red", "unknown key color"),
        ("data.colour=red", "unknown key data.colour"),
        ("sample.size=5", "unknown key sample.size of kind 'poisson'"),
        ("colors.red=1", "unknown key colors"),
        ("rounds=3.5", "rounds is 3.5"),
        ("rounds=ten", "rounds is 'ten'"),
        ("rounds=true", "rounds is True"),
        ("client.lr=fast", "client.lr is 'fast'"),
        ("client.lr=true", "client.lr is True"),
        ("data.clients=[1]", "data.clients is"),
        ("data.partition=random", "data.partition is 'random'.*iid"),
        ("name=5", "name is 5"),
        ("rounds=none", "give rounds, or iterations"),
        ("data=none", "data is missing"),
        ("data=5", "data is 5"),
        ("sample.kind=lottery", "sample.kind is 'lottery': use one of 'poisson'"),
        ("client.kind=adam", "client.kind is 'adam': use one of"),
        ("noise.kind=cauchy", "noise.kind is 'cauchy': use one of"),
        ("clip.norm=l3", "clip.norm is 'l3'"),
        ("noise.where=cloud", "noise.where is 'cloud'"),
        ("noise.source=secret", "noise.source is 'secret'"),
        ("server.optimizer=lamb", "server.optimizer is 'lamb'"),
        ("server.weights=equal", "server.weights is 'equal'"),
        ("engine.mode=fast", "engine.mode is 'fast'"),
        (
            "data.clinets=5",
            r"unknown key data.clinets: did you mean data.clients or data.client\?$",
        ),
        ("data.colour=red", "unknown key data.colour: fedveil explain data lists its keys$"),
        (
            "sample.raet=1",
            r"unknown key sample.raet of kind 'poisson': did you mean sample.rate\?$",
        ),
        ("sample.size=5", "kind 'poisson': it belongs to kind 'fixed' and 'round-robin'$"),
        ("clinet.lr=1", r"unknown key clinet: did you mean client\?$"),
        ("roundz=3", r"unknown key roundz: did you mean rounds\?$"),
        ("multiplier=2", r"unknown key multiplier: did you mean noise.multiplier\?$"),
        ("momentum=2", r"unknown key momentum: did you mean client.momentum or server.momentum\?$"),
        ("colour=red", "unknown key colour: fedveil explain lists all sections$"),
        (
            "data.clinets=none",
            r"unknown key data.clinets: did you mean data.clients or data.client\?$",
        ),
        ("colour=none", "unknown key colour"),
        ("bound=none", "'bound' is now called 'clip'"),
        ("data.name=digts", r"data.name is 'digts': choose one of .*did you mean digits\?$"),
        ("model.name=sofmax", r"model.name is 'sofmax': .*did you mean softmax\?$"),
    ],
)
def test_bad_values_are_named(setting, message):
    with pytest.raises(BadInput, match=message) as refusal:
        load_recipe("central", [setting])
    assert "\n" not in str(refusal.value)
    assert "pydantic" not in str(refusal.value)


@pytest.mark.parametrize(
    "setting", ["rounds", "=5", "", "data.=5", ".clients=5", "a.b.c=5", "name.first=x"]
)
def test_overrides_that_are_no_assignment_are_refused(setting):
    with pytest.raises(BadInput, match="--set"):
        load_recipe("central", [setting])


def test_the_old_word_for_held_out_clients_names_the_new_one():
    with pytest.raises(BadInput, match=r"data\.test 'owners' is now called 'by-client'$"):
        load_recipe("central", ["data.test=owners"])


def test_an_unknown_key_is_told_before_the_one_that_is_missing_for_it(tmp_path):
    with pytest.raises(BadInput, match=r"unknown key sample.sise of kind 'fixed': did you mean"):
        load_recipe("central", ["sample.kind=fixed", "sample.sise=5"])
    path = tmp_path / "mine.toml"
    path.write_text("name = 'mine'\nrounds = 3\n[dat]\nname = 'digits'\n")
    with pytest.raises(BadInput, match=r"unknown key dat: did you mean data\?$"):
        load_recipe(str(path))


def test_a_key_of_another_kind_can_be_left_out():
    assert load_recipe("central", ["sample.size=none"]) == load_recipe("central")


def test_unknown_recipes_are_refused_with_the_nearest():
    with pytest.raises(BadInput, match=r"or a .toml file; did you mean fedavg\?$"):
        load_recipe("fedvag")
    with pytest.raises(BadInput, match=r"or a .toml file$"):
        load_recipe("nothing")


def test_unknown_recipes_are_refused_with_the_known_ones():
    with pytest.raises(BadInput, match=f"'centrl' is unknown: use one of {', '.join(NAMES)}, or"):
        load_recipe("centrl")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rounds = ", "is not TOML"),
        (b"rounds = 1", "name is missing"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_files_that_are_no_recipe_are_refused(tmp_path, content, message):
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message):
        load_recipe(str(path))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"nowhere.toml does not exist"):
        load_recipe(str(tmp_path / "nowhere.toml"))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "central",
            ["noise.kind=none"],
            r"budget is given and nothing is claimed \(noise.kind 'none'",
        ),
        ("central", ["budget=none"], r"'gaussian' without a \[budget\]"),
        ("central", ["clip=none"], r"'gaussian' without a \[clip\]"),
        ("central", ["client.steps=3"], "exactly one of client.epochs and client.steps"),
        (
            "central",
            ["client.kind=sgd", "client.lr=1.0"],
            "exactly one of client.epochs and client.steps",
        ),
        ("central", ["model.hidden=[3]"], "model.hidden has no effect on 'softmax'"),
        ("central", ["data.path=x"], "x is no table that can be read"),
        ("central", ["data.path=x", "data.name=digits"], "data.path has no effect on 'digits'"),
        ("central", ["data.name=saved"], "data.clients has no effect on saved data"),
        ("central", ["server.weights=examples"], "server.weights is 'examples' under central DP"),
        ("central", ["noise.multiplier=0.3"], "contradict each other: one round alone costs"),
        ("central", ["budget.epsilon=inf"], "give noise.multiplier or budget.epsilon"),
        ("central", ["noise.multiplier=0"], "noise.multiplier is 0"),
        ("central", ["noise.multiplier=-1.0"], "noise.multiplier is -1.0"),
        ("central", ["engine.workers=-1"], "engine.workers is -1"),
        ("central", ["engine.checkpoint=0"], "engine.checkpoint is 0"),
        ("central", ["engine.chunk=-1"], "engine.chunk is -1"),
        ("central", ["evaluate.every=0"], "evaluate.every is 0"),
        ("central", ["seed=-1"], "seed is -1"),
        ("central", ["seed=9223372036854775808"], "seed is 9223372036854775808"),
        ("fedavg", ["server.optimizer=adam", "server.momentum=0.5"], "no effect on adam"),
        ("fedavg", ["client.optimizer=adam", "client.momentum=0.5"], "no effect on adam"),
        ("fedavg", ["client.beta1=0.5"], "client.beta1 has no effect on sgd"),
        ("fedavg", ["client.optimizer=sgd", "client.floor=0.5"], "client.floor has no effect"),
        ("dp-sgd", ["client.beta2=0.5"], "client.beta2 has no effect on sgd"),
        ("fedavg", ["server.beta1=0.5"], "server.beta1 has no effect on sgd"),
        ("fedavg", ["server.floor=0.5"], "server.floor has no effect on sgd"),
        ("fedavg", ["server.optimizer=yogi", "server.momentum=0.5"], "no effect on yogi"),
        ("fedavg", ["server.optimizer=adagrad", "server.beta2=0.5"], "no effect on adagrad"),
        ("fedavg", ["client.lr_floor=0.5"], "client.lr_floor has no effect on a constant"),
        ("fedavg", ["server.warmup=1000", "rounds=9"], "server.warmup is 1000 of 9 rounds"),
        ("fedavg", ["client.schedule=none", "client.warmup=-1"], "client.warmup is -1"),
        ("fedavg", ["client.schedule=fast"], "client.schedule is 'fast': use 'constant'"),
        (
            "dp-fedavg",
            ["client.lr=none", "client.mu=1.0", "client.gamma=8.0", "client.schedule=step"],
            "leave client.schedule, client.warmup and client.lr_floor out",
        ),
        (
            "dp-fedavg",
            ["budget.as_published=true", "client.warmup=2"],
            "as_published takes the learning rates of the first round",
        ),
        ("fedsgd", ["client.proximal=0.5"], "unknown key client.proximal of kind 'gradient'"),
    ],
)
def test_what_does_not_go_together_is_refused(name, settings, message):
    with pytest.raises(BadInput, match=message):
        build(load_recipe(name, settings))


@pytest.mark.parametrize("name", NAMES)
def test_shipped_recipes_run_on_embedded_data(name, tmp_path):
    recipe = load_recipe(name, ["rounds=2", "engine.workers=1"])
    run = Run.start(recipe, tmp_path / "run", None)
    result = run.execute()
    assert (result["rounds"], result["stopped"], result["refused"]) == (2, "rounds", {})
    assert all(math.isfinite(value) for value in result["metrics"].values())
    assert bool(result["claims"]) is (name in CLAIMED)
    assert (result["budget"] is not None) is (name in CLAIMED)
    if name in CLAIMED:
        assert result["noise"] in run.describe()
        assert all(claim["assumptions"] for claim in result["claims"])
        limit = math.inf if recipe.budget is None else recipe.budget.epsilon
        assert result["claims"][0]["epsilon"] <= limit
    else:
        assert run.describe().endswith("no privacy claim")


@pytest.mark.parametrize("iterations", [199, 201, 39])
def test_iterations_that_make_no_whole_rounds_are_refused(iterations):
    settings = ["rounds=none", f"iterations={iterations}", "client.steps=40"]
    with pytest.raises(BadInput, match=f"iterations is {iterations}, not a multiple"):
        load_recipe("dp-fedavg", settings)


def test_every_number_of_a_list_is_checked():
    with pytest.raises(BadInput, match=r"model\.hidden is 0"):
        load_recipe("central", ["model.name=mlp", "model.hidden=[4, 0]"])


def test_iterations_stand_for_rounds():
    recipe = load_recipe("dp-fedavg", ["rounds=none", "iterations=200", "client.steps=40"])
    assert (recipe.rounds, recipe.iterations) == (5, None)


def test_recipes_write_the_values_they_read():
    text = to_toml(load_recipe("central", ["budget.epsilon=inf"]).model_dump())
    assert tomllib.loads(text)["budget"]["epsilon"] == float("inf")


def test_a_key_can_be_left_out_by_an_override():
    assert load_recipe("central", ["data.clients=none"]).data.clients is None
    assert load_recipe("central", ["noise.kind=none", "budget=none"]).noise.kind == "none"
    with pytest.raises(BadInput, match=r"sample\.rate is missing"):
        load_recipe("central", ["sample.rate=none"])


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        ("central", ["bound.value=2.0"], "'bound' is now called 'clip'"),
        ("central", ["local.lr=2.0"], "'local' is now called 'client'"),
        ("local", [], "recipe 'local' is now called 'dp-sgd'"),
    ],
)
def test_old_names_are_told_by_their_new_ones(source, overrides, message):
    with pytest.raises(BadInput, match=message) as refusal:
        load_recipe(source, overrides)
    assert "\n" not in str(refusal.value)


def test_old_sections_of_a_file_are_told_by_their_new_names(tmp_path):
    path = tmp_path / "old.toml"
    path.write_text("name = 'old'\n[local]\nkind = 'gradient'\n")
    with pytest.raises(BadInput, match="'local' is now called 'client': rename the section"):
        load_recipe(str(path))
