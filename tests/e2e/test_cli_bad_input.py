"""Bad input: exit code 2, one line that starts with "error: ", nothing left behind."""

from pathlib import Path

import pytest


def words(text):
    return text.split()


def files():
    return sorted(str(path) for path in Path(".").rglob("*"))


SETTINGS = {
    "unknown key": ("colour=red", "colour"),
    "unknown key of a section": ("data.colour=red", "data.colour"),
    "key of another kind": ("sample.size=5", "sample.size"),
    "noise none with a budget": ("noise.kind=none", "budget"),
    "noise without a budget": ("budget=none", "budget"),
    "noise without a clip": ("clip=none", "clip"),
    "text for a number": ("client.lr=fast", "client.lr"),
    "text for a count": ("data.clients=many", "data.clients"),
    "list for a number": ("client.lr=[1]", "client.lr"),
    "number for a section": ("data=5", "data"),
    "rate 0": ("sample.rate=0", "sample.rate"),
    "rate 1.5": ("sample.rate=1.5", "sample.rate"),
    "rate nan": ("sample.rate=nan", "sample.rate"),
    "negative rate": ("sample.rate=-0.5", "sample.rate"),
    "negative noise": ("noise.multiplier=-1", "noise.multiplier"),
    "no noise": ("noise.multiplier=0", "noise.multiplier"),
    "noise nan": ("noise.multiplier=nan", "noise.multiplier"),
    "delta 1 / clients": ("budget.delta=0.01", "budget.delta"),
    "delta 1": ("budget.delta=1", "budget.delta"),
    "delta 0": ("budget.delta=0", "budget.delta"),
    "clip 0": ("clip.value=0", "clip.value"),
    "clip negative": ("clip.value=-1", "clip.value"),
    "clip nan": ("clip.value=nan", "clip.value"),
    "clip infinite": ("clip.value=inf", "clip.value"),
    "rounds 0": ("rounds=0", "rounds"),
    "rounds negative": ("rounds=-3", "rounds"),
    "rounds as float": ("rounds=3.0", "rounds"),
    "lr negative": ("client.lr=-1", "client.lr"),
    "lr 0": ("client.lr=0", "client.lr"),
    "lr nan": ("client.lr=nan", "client.lr"),
    "lr infinite": ("client.lr=inf", "client.lr"),
    "server lr nan": ("server.lr=nan", "server.lr"),
    "momentum 1": ("client.momentum=1", "client.momentum"),
    "seed negative": ("seed=-1", "seed"),
    "seed too large": ("seed=18446744073709551616", "seed"),
    "unknown model": ("model.name=resnet", "resnet"),
    "model that does not fit": ("model.name=small-cnn", "28 x 28"),
    "model for numbers": ("model.name=linear", "softmax"),
    "hidden layers of another model": ("model.hidden=[5]", "model.hidden"),
    "unknown data set": ("data.name=imagenet", "imagenet"),
    "unknown partition": ("data.partition=random", "data.partition"),
    "alpha without dirichlet": ("data.alpha=0.5", "alpha"),
    "no clients": ("data.clients=0", "clients"),
    "more clients than records": ("data.clients=100000", "clients"),
    "epsilon 0": ("budget.epsilon=0", "budget.epsilon"),
    "epsilon negative": ("budget.epsilon=-1", "budget.epsilon"),
    "epsilon nan": ("budget.epsilon=nan", "budget.epsilon"),
    "neither noise nor epsilon": ("budget.epsilon=inf", "noise.multiplier or budget.epsilon"),
    "epochs 0": ("client.epochs=0", "client.epochs"),
    "epochs and steps": ("client.steps=5", "exactly one of client.epochs and client.steps"),
    "negative batch": ("client.batch=-1", "client.batch"),
    "workers -1": ("engine.workers=-1", "engine.workers"),
    "every 0": ("evaluate.every=0", "evaluate.every"),
    "no assignment": ("rounds", "--set"),
    "no key": ("=5", "--set"),
    "too deep": ("a.b.c=5", "--set"),
    "key of a number": ("rounds.many=5", "--set"),
}


@pytest.mark.parametrize(("setting", "mentions"), SETTINGS.values(), ids=SETTINGS)
def test_a_bad_setting(cli, setting, mentions):
    told = cli("run", "central", "--set", setting, "--out", "new")
    assert mentions in told.error
    assert told.out == ""
    assert files() == []


SEVERAL = {
    "delta missing": (["budget=none", "budget.epsilon=8"], "budget.delta is missing"),
    "more clients per round than clients": (
        ["sample.kind=fixed", "sample.size=1438"],
        "only 1437 clients",
    ),
    "neither epochs nor steps": (
        ["client.kind=sgd", "client.lr=1"],
        "exactly one of client.epochs and client.steps",
    ),
    "a gradient with epochs": (["client.kind=gradient", "client.epochs=3"], "client.epochs"),
    "noise and epsilon that contradict": (
        ["noise.multiplier=0.3", "sample.kind=all"],
        "contradict",
    ),
    "unequal weights with noise": (
        ["server.weights=examples", "noise.multiplier=2.0", "budget.epsilon=inf"],
        "server.weights",
    ),
    "dirichlet without alpha": (["data.partition=dirichlet"], "alpha"),
    "natural clients that are not there": (["data.partition=natural"], "natural"),
    "saved data without a path": (["data.name=saved", "data.partition=iid"], "saved"),
    "adam with momentum": (["server.optimizer=adam", "server.momentum=0.5"], "server.momentum"),
}


@pytest.mark.parametrize(("several", "mentions"), SEVERAL.values(), ids=SEVERAL)
def test_bad_combinations(cli, several, mentions):
    told = cli("run", *(part for setting in several for part in ("--set", setting)))
    assert mentions in told.error
    assert files() == []


QUANTILE = ["clip.kind=quantile", "clip.value=0.1"]
MEDIAN = [
    "clip.kind=median",
    "clip.value=1.0",
    "clip.low=-5",
    "clip.high=5",
    "clip.every=10",
    "clip.epsilon=1.0",
    "clip.delta=1e-5",
]
LOCAL = {
    "noise epsilon 0": ("ldp-fl", ["noise.epsilon=0"], "noise.epsilon is 0"),
    "noise epsilon negative": ("ldp-fl", ["noise.epsilon=-1"], "noise.epsilon is -1"),
    "radius 0": ("ldp-fl", ["clip.radius=0"], "clip.radius is 0"),
    "radius negative": ("ldp-fl", ["clip.radius=-1"], "clip.radius is -1"),
    "range without most weights": (
        "ldp-fl",
        ["clip.perturb=weights", "clip.centre=1.0"],
        "excludes 100 %",
    ),
    "centre of updates": ("ldp-fl", ["clip.centre=1.0"], "clip.centre is 1.0"),
    "fewer clients than the shuffle needs": ("ldp-fl", ["data.clients=400"], "shuffle.minimum"),
    "shuffle of nobody": ("ldp-fl", ["shuffle.minimum=0"], "shuffle.minimum is 0"),
    "shuffle of fewer": ("ldp-fl", ["shuffle.minimum=-5"], "shuffle.minimum is -5"),
    "shuffled weights by examples": ("ldp-fl", ["server.weights=examples"], "server.weights"),
    "budget below a round": ("ldp-fl", ["budget.epsilon=1"], "one round of 650 weights"),
    "range without two-point": ("ldp-fl", ["noise.kind=gaussian"], "go together"),
    "shuffle without two-point": ("ldp-sgd", ["shuffle.minimum=5"], "[shuffle]"),
    "power negative": ("ldp-sgd", ["clip.power=-1"], "clip.power is -1"),
    "quantile 0": ("ldp-sgd", [*QUANTILE, "clip.quantile=0"], "clip.quantile is 0"),
    "quantile 1": ("ldp-sgd", [*QUANTILE, "clip.quantile=1"], "clip.quantile is 1"),
    "bits that cost everything": ("ldp-sgd", [*QUANTILE, "clip.bit_epsilon=10"], "bit_epsilon"),
    "bits noised too little": ("central", [*QUANTILE, "clip.bit_noise=0.01"], "clip.bit_noise"),
    "bits of local DP": ("central", [*QUANTILE, "clip.bit_epsilon=1"], "clip.bit_epsilon"),
    "quantile without a claim": ("norm-bound", QUANTILE, "use a fixed one"),
    "everyone at the cap": ("ldp-sgd", ["sample.max_participations=5"], "at its cap"),
    "cap 0": ("ldp-sgd", ["sample.max_participations=0"], "max_participations is 0"),
    "cap that nobody counts": ("fedavg", ["sample.max_participations=9"], "max_participations"),
    "cap under central DP": (
        "central",
        ["sample.kind=fixed", "sample.size=5", "sample.max_participations=9"],
        "max_participations",
    ),
    "local weights by examples": ("ldp-sgd", ["server.weights=examples"], "server.weights"),
    "median with sgd": (
        "central",
        ["noise.where=client", "noise.multiplier=9.0", *MEDIAN],
        "clip.kind 'median'",
    ),
    "median under central DP": ("central", MEDIAN, "fixed, decaying or quantile"),
    "laplace with l2": ("dp-fedavg", ["clip.norm=l2"], "clip.norm = 'l1'"),
    "gaussian with l1": ("dp-fedavg-gaussian", ["clip.norm=l1"], "clip.norm = 'l2'"),
    "central with l1": ("central", ["clip.norm=l1"], "clip.norm = 'l2'"),
    "laplace at the server": ("dp-fedavg", ["noise.where=server"], "noise.where"),
    "no noise at clients": ("ldp-sgd", ["noise.multiplier=0"], "noise.multiplier is 0"),
    "no Laplace noise": ("dp-fedavg", ["noise.multiplier=0"], "noise.multiplier is 0"),
    "no noise in training": ("dp-sgd", ["noise.multiplier=0"], "noise.multiplier is 0"),
    "dp-sgd without its noise": ("dp-sgd", ["noise.where=client"], "noise.where = 'training'"),
    "noise without dp-sgd": ("ldp-sgd", ["noise.where=training"], "client.kind 'dp-sgd'"),
    "dp-sgd with decay": ("dp-sgd", ["clip.kind=poly", "clip.value=1", "clip.power=1"], "fixed"),
    "dp-sgd rate 0": ("dp-sgd", ["client.rate=0"], "client.rate is 0"),
    "dp-sgd without steps": ("dp-sgd", ["client.steps=0"], "client.steps is 0"),
    "nominal 0": ("dp-sgd", ["client.nominal=0"], "client.nominal is 0"),
    "nominal with examples": ("dp-sgd", ["client.nominal=70"], "server.weights"),
    "two kinds of budget": ("ldp-sgd", ["budget.epsilons=[1.0, 2.0]"], "budget.epsilons"),
    "budgets and a multiplier": (
        "ldp-sgd",
        ["budget.epsilon=inf", "budget.epsilons=[1.0, 2.0]", "noise.multiplier=1.0"],
        "noise.multiplier is one number",
    ),
    "no budgets": ("ldp-sgd", ["budget.epsilon=inf", "budget.epsilons=[]"], "budget.epsilons"),
    "as published at the server": ("central", ["budget.as_published=true"], "as_published"),
    "c2 missing": ("dp-fedavg-gaussian", ["budget.as_published=true"], "noise.c2 is missing"),
    "c2 without effect": ("dp-fedavg-gaussian", ["noise.c2=1.0"], "noise.c2"),
    "rounds and iterations": ("dp-fedavg", ["iterations=40"], "not both"),
    "neither rounds nor iterations": ("dp-fedavg", ["rounds=none"], "give rounds"),
    "iterations that do not divide": (
        "dp-fedavg",
        ["rounds=none", "iterations=45"],
        "not a multiple of client.steps, 20",
    ),
    "momentum with clipped gradients": ("dp-fedavg", ["client.momentum=0.5"], "no momentum"),
    "decay with clipped gradients": ("dp-fedavg", ["client.weight_decay=0.5"], "no weight decay"),
    "FedProx with clipped gradients": ("dp-fedavg", ["client.proximal=0.5"], "no proximal term"),
    "Adam with clipped gradients": ("dp-fedavg", ["client.optimizer=adam"], "no Adam"),
    "clipped gradients of one gradient": ("ldp-sgd", ["clip.each=gradient"], "clip.each"),
    "half a learning rate": ("dp-fedavg", ["client.mu=1.0"], "client.gamma"),
    "more clients in turn than clients": ("dp-fedavg", ["sample.size=351"], "only 350 clients"),
    "no claim and a budget": (
        "weak-dp",
        ["budget.epsilon=1.0", "budget.delta=1e-5"],
        "nothing is claimed",
    ),
    "no claim at the clients": ("weak-dp", ["noise.where=client"], "noise.claim"),
}


@pytest.mark.parametrize(("recipe", "several", "mentions"), LOCAL.values(), ids=LOCAL)
def test_bad_local_settings(cli, recipe, several, mentions):
    wanted = [part for setting in several for part in ("--set", setting)]
    told = cli("run", recipe, *wanted, "--out", "new")
    assert mentions in told.error
    assert told.out == ""
    assert files() == []


PIXEL = ["attack.kind=pixel", "attack.target=0", "attack.size=2"]
COLOUR = ["attack.kind=colour", "attack.source=7", "attack.target=1"]
ATTACKS = {
    "everybody attacks": ("fedavg", ["attack.attackers=100"], "100 of 100 clients"),
    "more attackers than clients": ("fedavg", ["attack.attackers=101"], "101 of 100 clients"),
    "a trigger outside the image": ("fedavg", ["attack.row=7"], "outside images of 8 x 8"),
    "a trigger larger than the image": ("fedavg", ["attack.size=9"], "outside images of 8 x 8"),
    "a label that is not there": ("fedavg", ["attack.target=10"], "labels 0 to 9"),
    "boost 0": ("fedavg", ["attack.boost=0"], "attack.boost is 0"),
    "boost negative": ("fedavg", ["attack.boost=-3"], "attack.boost is -3"),
    "boost infinite": ("fedavg", ["attack.boost=inf"], "attack.boost is inf"),
    "nothing poisoned": ("fedavg", ["attack.share=0"], "attack.share is 0"),
    "an attack after the end": ("fedavg", ["attack.start=999"], "start sooner"),
    "an end before the start": ("fedavg", ["attack.start=2", "attack.end=1"], "end later"),
    "more parts than rows": ("fedavg", ["attack.parts=3"], "attack.parts is 3"),
    "nothing to hide in": ("fedavg", ["attack.noise=hide"], "attack.noise is 'hide'"),
    "nothing to skip": ("fedavg", ["attack.noise=skip"], "attack.noise is 'skip'"),
    "the server's noise cannot be skipped": ("central", ["attack.noise=skip"], "is 'skip'"),
    "nothing to project to": ("fedavg", ["attack.project=true"], "updates are not clipped"),
    "a median and a claim": ("central", ["server.aggregate=median"], "noise is for the sum"),
    "Krum and a claim": ("central", ["server.aggregate=krum"], "noise is for the sum"),
    "attackers that shuffle": ("ldp-fl", ["attack.attackers=200"], "shuffle.minimum"),
    "attacks with secure noise": ("central", ["noise.source=secure"], "use noise.source"),
    "no colours": ("fedavg", COLOUR, "a colour needs"),
    "no texts": ("fedavg", ["attack.kind=phrase", "attack.phrase=a", "attack.target=1"], "texts"),
}


@pytest.mark.parametrize(("recipe", "several", "mentions"), ATTACKS.values(), ids=ATTACKS)
def test_bad_attacks(cli, recipe, several, mentions):
    kind = [] if several[0].startswith("attack.kind") else PIXEL
    wanted = [part for setting in (*kind, *several) for part in ("--set", setting)]
    told = cli("run", recipe, *wanted, "--out", "new")
    assert mentions in told.error
    assert told.out == ""
    assert files() == []


ARGUMENTS = {
    "unknown recipe": (["run", "centrl"], "'centrl' is unknown"),
    "missing recipe file": (["run", "nowhere.toml"], "nowhere.toml"),
    "missing data folder": (["run", "--set", "data.name=mnist", "--data", "nowhere"], "nowhere"),
    "no data folder": (["run", "--set", "data.name=mnist"], "FEDVEIL_DATA"),
    "resuming nothing": (["run", "--resume", "nowhere"], "nowhere holds no run"),
    "resuming with a recipe": (["run", "central", "--resume", "nowhere"], "--resume"),
    "resuming with a setting": (["run", "--set", "rounds=3", "--resume", "nowhere"], "--resume"),
    "unknown option": (["run", "--fast"], "--fast"),
    "unknown command": (["walk"], "walk"),
    "two recipes": (["run", "central", "fedavg"], "fedavg"),
    "option without a value": (["run", "--out"], "--out"),
    "missing ledger": (["ledger", "nowhere"], "nowhere"),
    "ledger of nothing": (["ledger"], "Missing argument"),
    "ledger of an empty folder": (["ledger", "."], "ledger.db"),
    "account of nothing": (["account"], "--delta"),
    "account with nothing to solve": (
        words("account --noise 1 --rate 1 --rounds 1 --epsilon 1 --delta 1e-5"),
        "exactly one",
    ),
    "account with two to solve": (words("account --noise 1 --rate 1 --delta 1e-5"), "rounds, eps"),
    "account with rate 2": (
        words("account --noise 1 --rate 2 --rounds 1 --delta 1e-5"),
        "--rate is 2",
    ),
    "account with noise 0": (
        words("account --noise 0 --rate 1 --rounds 1 --delta 1e-5"),
        "--noise is 0",
    ),
    "account with noise nan": (
        words("account --noise nan --rate 1 --rounds 1 --delta 1e-5"),
        "--noise is nan",
    ),
    "account with delta 1": (
        words("account --noise 1 --rate 1 --rounds 1 --delta 1"),
        "--delta is 1",
    ),
    "account with half a round": (
        words("account --noise 1 --rate 1 --rounds 1.5 --delta 1e-5"),
        "--rounds",
    ),
    "account with no rounds": (
        words("account --noise 1 --rate 1 --rounds 0 --delta 1e-5"),
        "--rounds is 0",
    ),
    "account with epsilon 0": (
        words("account --noise 1 --rate 1 --epsilon 0 --delta 1e-5"),
        "--epsilon is 0",
    ),
    "account with an epsilon below one round": (
        words("account --noise 1 --rate 1 --epsilon 0.1 --delta 1e-5"),
        "one round alone",
    ),
}


@pytest.mark.parametrize(("arguments", "mentions"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_bad_arguments(cli, arguments, mentions):
    told = cli(*arguments)
    assert mentions in told.error
    assert told.out == ""
    assert files() == []


@pytest.mark.parametrize("recipe", ["fedavg", "fedsgd"])
def test_more_rounds_than_memory_holds(cli, recipe):
    assert "rounds" in cli("run", recipe, "--set", "rounds=1000000000000").error
    assert files() == []


def test_a_folder_that_is_not_empty(cli):
    Path("full").mkdir()
    Path("full/mine").write_text("mine")
    assert "--out full" in cli("run", "--out", "full").error
    assert files() == ["full", "full/mine"]


def test_a_file_instead_of_a_folder(cli):
    Path("mine").write_text("mine")
    assert "--out mine" in cli("run", "--out", "mine").error
    assert "run directory" in cli("run", "fedavg", "--out", "mine/run").error
    assert files() == ["mine"]


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 100, b"x"])
def test_a_file_that_is_no_ledger(cli, content):
    Path("mine.db").write_bytes(content)
    assert "not a fedveil ledger" in cli("ledger", "mine.db").error
    assert Path("mine.db").read_bytes() == content


@pytest.mark.parametrize("content", ["rounds =", "rounds = 3", "[[data]]", "\N{SNOWMAN}"])
def test_a_file_that_is_no_recipe(cli, content):
    Path("mine.toml").write_text(content)
    assert "mine.toml" in cli("run", "mine.toml").error
    assert files() == ["mine.toml"]


def test_a_refusal_as_a_process(spawn, tmp_path):
    process = spawn("run", "central", "--set", "sample.rate=0", "--json", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert err == "error: sample.rate is 0.0: a probability in (0, 1] is needed\n"
    assert list(tmp_path.iterdir()) == []
