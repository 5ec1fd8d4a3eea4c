"""Enemies of a claim who bring the data: test rows that are the clients' own, under other names."""

import csv
import re
from collections import Counter

import numpy as np
import pytest
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe

COLUMNS = {"age": {"low": 0, "high": 100}, "dose": {"low": 0, "high": 10}}
LABELS = {"values": ["no", "yes"]}
HOSPITALS, EACH = 6, 20


def rows(hospitals=HOSPITALS, rename=str):
    random = np.random.default_rng(0)
    return [
        [rename(f"h{k // EACH}"), f"{random.uniform(20, 90):.3f}", f"{random.uniform(0, 10):.3f}",
         ("no", "yes")[int(random.integers(2))]]
        for k in range(hospitals * EACH)
    ]  # fmt: skip


def write(path, table, header=("site", "age", "dose", "ill")):
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *table])
    return str(path)


def settings(path, *more):
    return [
        f"data.path={path}",
        "data.target=ill",
        'data.features=["age", "dose"]',
        *(
            f"data.columns.{name}.{key}={value}"
            for name, column in COLUMNS.items()
            for key, value in column.items()
        ),
        'data.columns.ill.values=["no", "yes"]',
        "noise.source=secure",
        "rounds=2",
        "budget.delta=1e-3",
        *more,
    ]


def training(path, *more):
    return build(load_recipe("central", settings(path, *more)))


def claims(found):
    return found.plan.claims(2)


def test_nobody_of_a_table_is_held_out_unasked(tmp_path):
    found = training(write(tmp_path / "t.csv", rows()), "data.client=site")
    assert (found.data.clients, found.data.records) == (HOSPITALS, HOSPITALS * EACH)
    assert len(found.data.test_y) == 0
    assert list(fv.train(found))[-1].metrics == {}


def test_whoever_is_held_out_is_counted_in_every_claim(tmp_path):
    path = write(tmp_path / "t.csv", rows())
    found = training(path, "data.client=site", "data.test=by-client")
    held = HOSPITALS - found.data.clients
    assert held > 0
    for claim in claims(found):
        assert any(
            f"{held} owner" in text and "not protected" in text for text in claim.assumptions
        )


OWN = "test records"


@pytest.mark.parametrize("client", [["data.client=site"], ["data.clients=6"]])
def test_the_table_itself_is_no_test_table(tmp_path, client):
    path = write(tmp_path / "t.csv", rows())
    with pytest.raises(BadInput, match=OWN):
        training(path, *client, f"data.test={path}")


@pytest.mark.parametrize("client", [["data.client=site"], ["data.clients=6"]])
def test_nor_is_a_copy_of_it(tmp_path, client):
    path, copy = (write(tmp_path / name, rows()) for name in ("t.csv", "u.csv"))
    with pytest.raises(BadInput, match=OWN):
        training(path, *client, f"data.test={copy}")


def test_nor_with_other_names_of_clients(tmp_path):
    path = write(tmp_path / "t.csv", rows())
    renamed = write(tmp_path / "u.csv", rows(rename=lambda name: f"other {name}"))
    with pytest.raises(BadInput, match="test records equal clients' records"):
        training(path, "data.client=site", f"data.test={renamed}")


def test_nor_with_rows_turned_and_columns_moved(tmp_path):
    path = write(tmp_path / "t.csv", rows())
    turned = write(tmp_path / "u.csv", [row[:0:-1] for row in rows()[::-3]], ("ill", "dose", "age"))
    with pytest.raises(BadInput, match="test records equal clients' records"):
        training(path, "data.client=site", f"data.test={turned}")


def test_seeded_runs_say_that_the_test_rows_are_clients(tmp_path):
    path = write(tmp_path / "t.csv", rows())
    found = training(path, "data.clients=6", f"data.test={path}", "noise.source=seeded")
    for claim in claims(found):
        assert any("test records of the clients themselves" in text for text in claim.assumptions)


def test_statistics_of_such_test_rows_are_statistics_of_the_clients(tmp_path):
    path = write(tmp_path / "t.csv", rows())
    said = [s for s in settings(path) if "columns.age" not in s and "secure" not in s]
    found = build(load_recipe("central", [*said, "data.clients=6", f"data.test={path}"]))
    assert "'age'" in found.data.fitted
    with pytest.raises(BadInput, match="'secure' and means"):
        found.data.check_secure()


def arrays(seed=0, count=120):
    random = np.random.default_rng(seed)
    return random.normal(size=(count, 4)).astype(np.float32), random.integers(2, size=count)


def secure(data):
    plan = fv.central(
        fv.samplers.Everyone(),
        data.clients,
        fv.clips.Fixed(1.0),
        rounds=2,
        budget=fv.Budget(8, 1e-3),
    )
    task = fv.Task(nn.Linear(4, 2), fv.cross_entropy)
    work = fv.ClientSgd(fv.Batches(0, steps=1), lr=0.1)
    return fv.Training(
        task, data, fv.releases.with_secure_noise(plan, task.size, diagnostics=False), work
    )


@pytest.mark.parametrize(
    "how", [lambda a: a, lambda a: a.copy(), lambda a: a[::-1], lambda a: a[::7]]
)
def test_arrays_of_the_clients_are_no_test_split(how):
    x, y = arrays()
    clients = [(f"c{k}", x[20 * k : 20 * k + 20], y[20 * k : 20 * k + 20]) for k in range(6)]
    data = fv.FederatedData.from_clients(clients, test=(how(x), how(y)), classes=2)
    with pytest.raises(BadInput, match=OWN):
        secure(data)


def test_nor_when_they_are_declared_owners_of_their_own():
    x, y = arrays()
    clients = [(f"c{k}", x[20 * k : 20 * k + 20], y[20 * k : 20 * k + 20]) for k in range(6)]
    data = fv.FederatedData.from_clients(
        clients, test=(x.copy(), y), test_owners=[f"p{k}" for k in range(120)], classes=2
    )
    with pytest.raises(BadInput, match=OWN):
        secure(data)


def test_joining_does_not_wash_data_that_secure_noise_refuses():
    x, y = arrays()
    clients = [(f"c{k}", x[20 * k : 20 * k + 20], y[20 * k : 20 * k + 20]) for k in range(6)]
    for options in ({"fitted": "means"}, {"test": (x[:9], y[:9])}):
        data = fv.FederatedData.from_clients(clients, classes=2, **options)
        with pytest.raises(BadInput, match=r"noise\.source is .secure."):
            secure(data)
        with pytest.raises(BadInput, match=r"noise\.source is .secure."):
            secure(data.concatenated())


def few_columns(seed, count=90):
    """A table with owners and persons in which many rows are equal, and many are not."""
    random = np.random.default_rng(seed)
    return [
        (f"c{random.integers(14)}", f"p{random.integers(40)}",
         round(float(random.choice([random.integers(4), random.uniform(0, 9)])), 3),
         ("no", "yes")[int(random.integers(2))])
        for _ in range(count)
    ]  # fmt: skip


NAMES = ("site", "patient", "dose", "ill")


def where(records, **options):
    """How often each row is at which client, or on the test side (None). None if refused."""
    columns = {"dose": {"low": 0, "high": 10}, "ill": {"values": ["no", "yes"]}}
    options = {"target": "ill", "features": ["dose"], "columns": columns, **options}
    most = options.pop("most", None)
    table = dict(zip(NAMES, map(list, zip(*records, strict=True)), strict=True))
    try:
        data = fv.FederatedData.from_table(table, **options)
    except BadInput as e:
        if re.search(r"get no row|no name falls|would be held out|leaves no client", str(e)):
            return None
        raise
    data = data if most is None else data.shortened(most)
    owner = np.repeat([data.client_name(k) for k in range(data.clients)], data.sizes)
    named = [
        (str(who), x.tobytes(), int(y)) for who, x, y in zip(owner, data.x, data.y, strict=True)
    ]
    tested = [(None, x.tobytes(), int(y)) for x, y in zip(data.test_x, data.test_y, strict=True)]
    return Counter([*named, *tested])


WAYS = {
    "a share": {"test": 0.2, "clients": 1},
    "a share, dealt": {"test": 0.3, "clients": 4},
    "dealt": {"clients": 5},
    "dealt, with persons": {"clients": 4, "person": "patient"},
    "dealt by mixes": {"clients": 3, "partition": "dirichlet", "alpha": 2.0},
    "dealt by mixes, a share": {"clients": 3, "partition": "dirichlet", "alpha": 2.0, "test": 0.2},
    "a share of clients' rows": {"client": "site", "test": 0.2},
    "a share of people": {"test": 0.3, "clients": 3, "person": "patient"},
    "a share of clients' people": {"client": "site", "test": 0.3, "person": "patient"},
    "by client": {"client": "site", "test": "by-client"},
    "grouped": {"client": "site", "partition": "grouped", "clients": 3},
    "two groups": {"client": "site", "partition": "grouped", "clients": 2, "test": "by-client"},
    "all natural": {"client": "site"},
}
LAST_ROWS = [WAYS["a share of clients' rows"]]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_one_record_more_or_less_moves_no_other(way):
    """One record leaves one place, and all others stay, whatever the table and the record."""
    compared = 0
    for seed in range(6):
        records = few_columns(seed)
        whole = where(records, **way)
        for gone in range(0, len(records), 9):
            rest = where([*records[:gone], *records[gone + 1 :]], **way)
            if whole is None or rest is None:
                continue
            compared += 1
            lost, found = whole - rest, rest - whole
            assert not found
            if lost.total() > 1:  # somebody's last row to train on, who then is no client
                assert way in LAST_ROWS
                (client,) = {who for who, _, _ in lost} - {None}
                assert not any(who == client for who, _, _ in rest)
            assert lost.total() >= 1
    assert compared > 30


@pytest.mark.parametrize(
    "way",
    [
        *({"client": "site", "test": "by-client"}, {"client": "site", "test": 0.2}),
        *({"client": "site"}, {"client": "site", "most": 3}, {"test": 0.3, "clients": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("unit", ["site", "patient"])
def test_one_owner_more_or_less_moves_nobody_else(way, unit):
    """A client or a person leaves with all records, and all records of others stay."""
    if unit == "patient" and "most" in way:
        pytest.skip("a person's records are not shortened: such plans are refused")
    compared = 0
    for seed in range(6):
        records = few_columns(seed)
        more = {"person": "patient"} if unit == "patient" else {}
        place = NAMES.index(unit)
        whole = where(records, **way, **more)
        for gone in sorted({row[place] for row in records})[::4]:
            rest = where([row for row in records if row[place] != gone], **way, **more)
            if whole is None or rest is None:
                continue
            compared += 1
            assert not rest - whole
            assert (whole - rest).total() <= sum(row[place] == gone for row in records)
    assert compared > 10


def test_a_share_of_a_number_of_owners_moves_one_at_most():
    """With `clients`, whoever joins takes the place of one other at most."""
    records, way = few_columns(1), {"client": "site", "clients": 5}
    whole = {who for who, _, _ in where(records, **way)}
    for gone in sorted({row[0] for row in records}):
        rest = {who for who, _, _ in where([r for r in records if r[0] != gone], **way)}
        assert len(rest - whole) == len(whole - rest) == (gone in whole)
