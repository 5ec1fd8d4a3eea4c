"""Fifty mistakes of a new user: each is answered by one line that names the thing and a way out."""

import shlex

import pytest

TABLE = """hospital,patient,age,sex,outcome
north,1,50,f,yes
north,2,61,m,no
south,3,,f,yes
south,4,40,m,no
"""
SECTION = "it is a section; set its keys, such as"
OWN = "run central --set data.path=t.csv --set data.client=hospital --set data.target=outcome"
MISTAKES = {
    "run --set epsilon=2": "unknown key epsilon: did you mean",
    "run --set clients=100": "unknown key clients: did you mean data.clients",
    "run --set privacy.epsilon=2": "unknown key privacy: fedveil explain lists all sections",
    "run --set budget.eps=2": "did you mean budget.epsilon or budget.epsilons?",
    "run --set budget.epsilon=two": "budget.epsilon is 'two': a number is needed",
    "run --set budget.epsilon=-1": "budget.epsilon is -1.0: a positive number is needed",
    "run --set budget=2": f"budget is 2: {SECTION} budget.epsilon",
    "run --set budget.delta=0.01": "not below 1 / 1437 clients",
    "run --set data=mnist": f"data is 'mnist': {SECTION} data.name",
    "run --set clip=1": f"clip is 1: {SECTION} clip.value",
    "run --set data.name=minst": "did you mean mnist?",
    "run --set model=softmax": f"model is 'softmax': {SECTION} model.name",
    "run --set model.name=resnet": "choose one of linear, softmax, mlp",
    "run --set data.clients=2000": "2000 clients for 1437 training records: use fewer clients",
    "run --set sample.rate=50": "sample.rate is 50.0: a probability in (0, 1] is needed",
    "run --set sample.rate=50%": "sample.rate is '50%': a number is needed",
    "run --set sample.size=50": "it belongs to kind 'fixed' and 'round-robin'",
    "run --set client.epochs=2": "it belongs to kind 'sgd'",
    "run --set client.kind=sgd --set client.lr=1": "exactly one of client.epochs and client.steps",
    "run --set rounds=ten": "rounds is 'ten': a whole number is needed",
    "run --set rounds=1e3": "rounds is 1000.0: a whole number is needed",
    "run --set rounds=0": "rounds is 0: at least one is needed",
    "run --set rounds": "write it as section.key=value",
    "run --set =3": "write it as section.key=value",
    "run --set clip.value=0": "clip.value is 0.0: a number of at least",
    "run --set clip.norm=linf": "clip.norm is 'linf': use 'l1' or 'l2'",
    "run --set noise.multiplier=0": "no finite epsilon exists; use noise.kind = 'none'",
    "run --set noise.source=urandom": "noise.source is 'urandom': use 'seeded' or 'secure'",
    "run --set noise=none": "leave the budget out (--set budget=none)",
    "run --set server.lr=0": "server.lr is 0.0: a positive number is needed",
    "run --set engine.mode=gpu": "use 'vectorised', 'looped' or 'fastest'",
    "run --epsilon 2": "set by --set KEY=VALUE; did you mean clip.epsilon, noise.epsilon, budget.",
    "run --rounds 10": "No such option '--rounds': keys of a recipe are set by --set KEY=VALUE",
    "run centrel": "did you mean central?",
    "run my.toml": "my.toml does not exist: a relative path is relative to",
    "run t.csv": "t.csv is a table, not a recipe: --set data.path=t.csv",
    "run central --set client.steps=3": "set exactly one of client.epochs and client.steps",
    "run sites --set data.sites=1": "a secure sum of 1 sites: at least 3 are needed",
    "run sites --set data.clients=4": "sites is 3 and clients is 4: leave one out",
    "run sites --set noise.share=half": "noise.share is 'half': use 'whole' or 'part'",
    "run --out t.csv": "--out t.csv exists and is not an empty directory",
    "run central --set data.path=x.csv --set data.target=y": "x.csv does not exist",
    "run central --set data.path=t.csv": "data.target is missing: name the column",
    f"{OWN} --set data.client=clinic": "t.csv has no column 'clinic': its columns are 'hospital'",
    f"{OWN} --set data.missing=drop": "data.missing is 'drop': use 'refuse' or 'fill'",
    f"{OWN} --set data.features=age": "data.features is 'age': a list is needed, such as",
    f"{OWN} --set data.missing=fill": "declare it (columns), hold owners out (test = 'by-client')",
    "explain epsilonn": "unknown key epsilonn: did you mean",
    "account --rate 2 --rounds 9 --epsilon 1 --delta 1e-5": "--rate is 2.0: a probability",
    "recipe": "No such command 'recipe'. Did you mean 'recipes'? (see fedveil --help)",
    "report nowhere": "nowhere holds no run: name the directory of a run",
    "compare a b": "a holds no run",
    "deploy central fed": "name the sites (--sites north,south,east)",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_answered_by_one_line(cli, tmp_path, line):
    (tmp_path / "workplace" / "t.csv").write_text(TABLE)
    told = cli(*shlex.split(line)).error
    assert MISTAKES[line] in told
    for word in ("Traceback", "Errno", "Section", "input should", "value error", "dictionary"):
        assert word not in told
    assert [path.name for path in (tmp_path / "workplace").iterdir()] == ["t.csv"]


def test_there_are_fifty():
    assert len(MISTAKES) >= 50
