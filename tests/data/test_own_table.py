"""Own tables: what one client's rows decide, what was fitted on whose rows, and who says so."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput

SITES = 12
DECLARED = {
    "age": {"low": 0, "high": 100},
    "dose": {"mean": 5, "std": 2},
    "city": {"values": ["bonn", "rome"], "other": True},
    "well": {"values": ["no", "yes"]},
}
ON_TEST = (
    "means and standard deviations of 'age', 'dose', categories of 'city', labels of 'well' were "
    "fitted on the test records, which no claim covers"
)
ON_CLIENTS = (
    "means and standard deviations of 'age', 'dose', categories of 'city', labels of 'well'"
)


def site(name, seed, count=6):
    """Rows of one site."""
    random = np.random.default_rng(seed)
    return [
        {
            "site": name,
            "age": int(random.integers(20, 80)),
            "dose": float(random.normal(5, 2)),
            "city": str(random.choice(["bonn", "rome"])),
            "well": ("no", "yes")[k % 2],
        }
        for k in range(count)
    ]


def table(rows):
    return {name: [row[name] for row in rows] for name in ("site", *DECLARED)}


def federation(changed=None, sites=SITES):
    """Rows of all sites, in some order, with those of site s0 replaced."""
    by_site = [site(f"s{k}", k) for k in range(sites)]
    if changed is not None:
        by_site[0] = [{**row, "site": "s0"} for row in changed]
    return table([row for rows in by_site for row in rows])


def made(rows, **options):
    options = {"test": "by-client", **options}
    return fv.FederatedData.from_table(rows, client="site", target="well", **options)


def held(data):
    count = SITES - data.clients
    return (
        f"{count} owners are held out of {SITES} for testing, measured in the clear, and not "
        "protected by this claim"
    )


def of_others(data):
    """Everything but the records of s0, by client."""
    owner = np.repeat(data.names, data.sizes)
    kept = owner != "s0"
    return data.names[data.names != "s0"].tolist(), owner[kept].tolist(), data.x[kept], data.y[kept]


anything = st.lists(
    st.fixed_dictionaries(
        {
            "age": st.integers(-(10**9), 10**9),
            "dose": st.floats(-1e9, 1e9),
            "city": st.sampled_from(["bonn", "oslo", "a city that nobody else has"]),
            "well": st.sampled_from(["no", "yes"]),
        }
    ),
    min_size=2,
    max_size=12,
)


@given(anything)
@pytest.mark.parametrize("how", ["held-out", "declared", "test table", "declared, share"])
def test_one_client_s_rows_decide_about_nothing_but_its_own_records(how, rows):
    options = {
        "held-out": {},
        "declared": {"columns": DECLARED},
        "test table": {"test": table(site("t1", 100) + site("t2", 101))},
        "declared, share": {"columns": DECLARED, "test": 0.3},
    }[how]
    before, after = made(federation(), **options), made(federation(rows), **options)
    assert "s0" in before.names
    assert ("s0" in after.names) or how == "declared, share"  # which may hold out all its rows
    assert before.schema == after.schema
    assert before.assumptions == after.assumptions
    for one, other in zip(of_others(before), of_others(after), strict=True):
        np.testing.assert_array_equal(one, other)
    if how != "declared, share":  # whose test split has records of s0
        np.testing.assert_array_equal(before.test_x, after.test_x)
        np.testing.assert_array_equal(before.test_y, after.test_y)


def test_the_order_of_rows_decides_about_no_order_of_clients():
    columns = federation()
    turned = {name: column[::-1] for name, column in columns.items()}
    first, second = made(columns), made(turned)
    assert first.names.tolist() == second.names.tolist() == sorted(first.names)
    assert first.schema.target_column == second.schema.target_column
    assert set(first.test_x[:, 2]) == set(second.test_x[:, 2])


def test_statistics_of_the_test_split_are_statistics_of_the_test_split():
    data = made(federation())
    np.testing.assert_allclose(data.test_x[:, :2].mean(axis=0), [0, 0], atol=1e-6)
    np.testing.assert_allclose(data.test_x[:, :2].std(axis=0), [1, 1], rtol=1e-5)
    assert np.abs(data.x[:, :2].mean(axis=0)).max() > 1e-3
    assert (data.fitted, data.assumptions) == ("", (ON_TEST,))
    assert data.test_assumptions == (held(data),)
    assert not data.test_of_clients
    data.check_secure()


def test_what_is_declared_is_not_fitted():
    data = made(federation(), columns=DECLARED)
    assert (data.fitted, data.remarks, data.assumptions) == ("", (), ())
    assert data.schema.feature_columns[0].to_dict() == {"name": "age", "low": 0.0, "high": 100.0}
    half = made(federation(), columns={"age": {"low": 0, "high": 100}, "well": DECLARED["well"]})
    assert half.assumptions == (
        "means and standard deviations of 'dose', categories of 'city' were fitted on the test "
        "records, which no claim covers",
    )


def test_statistics_of_clients_are_outside_every_claim_and_refused_with_secure_noise():
    data = made(federation(), statistics="clients")
    np.testing.assert_allclose(data.x[:, :2].mean(axis=0), [0, 0], atol=1e-6)
    assert data.fitted == ON_CLIENTS
    (said,) = data.assumptions
    assert said == f"{ON_CLIENTS} were fitted on clients' records in the clear: outside this claim"
    with pytest.raises(BadInput, match=r"'secure' and means and .* 'held-out'"):
        data.check_secure()


def test_statistics_can_be_declared_public():
    data = made(federation(), statistics="public")
    assert (data.fitted, data.declared_public) == (ON_CLIENTS, True)
    assert data.assumptions == (f"declared public: {ON_CLIENTS}",)
    data.check_secure()


@pytest.mark.parametrize("test", [0.25, table(site("s3", 50))])
def test_statistics_of_clients_own_test_rows_are_statistics_of_clients(test):
    """A share, and a test table with a client in it."""
    data = made(federation(), test=test)
    assert data.test_of_clients
    assert data.fitted == ON_CLIENTS
    left_out = [] if isinstance(test, dict) else [LEFT_OUT]
    assert data.assumptions == (
        f"{ON_CLIENTS} were fitted on clients' records in the clear: outside this claim",
        *left_out,
    )
    assert len(data.test_assumptions) == 1
    with pytest.raises(BadInput, match="'secure' and means"):
        data.check_secure()
    declared = made(federation(), test=test, columns=DECLARED)
    assert (declared.fitted, declared.test_of_clients) == ("", True)
    with pytest.raises(BadInput, match="'secure' and test records are the clients' own"):
        declared.check_secure()


def test_a_test_table_of_others_has_owners_who_are_held_out():
    test = table(site("t1", 100) + site("t2", 101))
    data = made(federation(), test=test)
    assert (data.clients, len(data.test_x), data.test_of_clients) == (SITES, 12, False)
    assert data.assumptions == (ON_TEST,)
    assert data.held_out_owners == 2
    assert "2 owners are held out of 14" in data.test_assumptions[0]


def test_a_test_table_that_names_nobody_is_public():
    test = {k: v for k, v in table(site("x", 50)).items() if k != "site"}
    data = made(federation(), test=test)
    assert (data.held_out_owners, data.test_of_clients) == (0, False)
    assert data.test_assumptions == ("the test records are taken as public",)
    data.check_secure()


def test_without_a_test_split_every_row_is_a_client_s_and_nothing_is_fitted():
    data = made(federation(), test=None, columns=DECLARED)
    assert (data.clients, data.records, len(data.test_y)) == (SITES, 6 * SITES, 0)
    assert (data.assumptions, data.test_assumptions) == ((), ())
    with pytest.raises(BadInput, match="nothing is declared of 'dose', 'city', and there is no"):
        made(federation(), test=None, columns={k: DECLARED[k] for k in ("age", "well")})


LEFT_OUT = (
    "clients whose rows would all be held out are left out: which clients these are is taken as "
    "public"
)


def test_a_client_whose_rows_would_all_be_held_out_is_left_out():
    """In three of four of these tables, about, somebody is: nobody is tested on alone."""
    found = 0
    for seed in range(20):
        rows = table([row for k in range(12) for row in site(f"s{k}", 100 * seed + k, count=2)])
        data = made(rows, test=0.4, columns=DECLARED)
        assert LEFT_OUT in data.assumptions
        assert data.held_out_owners == 0
        assert data.records + len(data.test_y) == 2 * data.clients
        found += data.clients < 12
    assert found > 5


def test_rows_that_are_dealt_have_a_test_split_of_nobody_s_rows():
    columns = {name: column for name, column in federation().items() if name != "site"}
    data = fv.FederatedData.from_table(columns, target="well", clients=10, test=0.2)
    tested = len(data.test_x)
    assert 5 < tested < 25  # of 75
    assert (data.clients, data.records, data.test_of_clients) == (10, 6 * SITES - tested, False)
    assert data.assumptions == (ON_TEST,)
    assert data.held_out_owners == tested  # each row may be another person's
    other = fv.FederatedData.from_table(columns, target="well", clients=10, seed=1, test=0.2)
    np.testing.assert_array_equal(data.test_x, other.test_x)
    assert not np.array_equal(data.x, other.x)
    with pytest.raises(BadInput, match="partition 'shards' goes by how many rows there are"):
        fv.FederatedData.from_table(columns, target="well", clients=2, partition="shards", test=0.2)


def test_unseen_categories_are_zeros_and_types_that_clients_do_not_keep_are_refused():
    odd = [{**row, "city": "oslo"} for row in site("s0", 0)]
    data = made(federation(odd))
    first = data.names.tolist().index("s0")
    assert (data.x[data.offsets[first] : data.offsets[first + 1], 2:] == 0).all()
    with pytest.raises(BadInput, match=r"row 1 of column 'age' is 'old': a number is needed"):
        made(federation([{**row, "age": "old"} for row in site("s0", 0)]))


def test_clients_with_few_records_are_left_out_and_no_claim_says_how_many():
    columns = federation(site("s0", 0, count=2))
    assert "s0" in made(columns).names
    data = made(columns, min_records=3)
    assert "s0" not in data.names
    assert data.remarks[-1] == (
        "which clients have at least 3 records is public: the others were left out"
    )


def test_claims_of_a_training_say_it():
    data = made(federation(), statistics="clients", min_records=3)
    plan = fv.central(
        fv.samplers.Poisson(0.5),
        data.clients,
        fv.clips.Fixed(1.0),
        rounds=2,
        budget=fv.Budget(8, 1e-3),
    )
    task = fv.Task(nn.Linear(*data.record_shape, 2), fv.cross_entropy)
    work = fv.ClientSgd(fv.Batches(0, steps=1), lr=0.1)
    training = fv.Training(task, data, plan, work)
    for claim in training.plan.claims(2):
        assert set(data.assumptions) <= set(claim.assumptions)
    assert len(data.assumptions) == 2
    with pytest.raises(BadInput, match="'secure' and means"):
        fv.Training(
            task, data, fv.releases.with_secure_noise(plan, task.size, diagnostics=False), work
        )


def test_labels_are_found_or_a_number_is():
    columns = federation()
    many = len(columns["age"])

    def target(entries, **said):
        return fv.FederatedData.from_table(
            {**columns, "y": entries}, client="site", target="y", features=["age"],
            test="by-client",
            **({"columns": {"y": said}} if said else {})
        )  # fmt: skip

    assert target([k % 3 for k in range(many)]).schema.label_names == (0, 1, 2)
    assert target([str(k % 3) for k in range(many)]).schema.label_names == (0, 1, 2)
    assert target(["ab"[k % 2] for k in range(many)]).schema.label_names == ("a", "b")
    assert target([k % 2 == 0 for k in range(many)]).schema.label_names == (False, True)
    assert target(["TRUE", "false"] * (many // 2)).schema.label_names == (False, True)
    number = target([k / 7 for k in range(many)])
    assert (number.classes, number.y.dtype) == (0, np.float32)
    assert "the type of 'y'" in number.assumptions[0]
    np.testing.assert_allclose(sorted([*number.y, *number.test_y]), np.arange(many) / 7, rtol=1e-6)
    scaled = target([float(k) for k in range(many)], low=0, high=many - 1)
    assert (scaled.classes, min(scaled.y), max([*scaled.y, *scaled.test_y])) == (0, -1, 1)
    assert target([k % 3 for k in range(many)], values=[2, 1, 0]).schema.label_names == (2, 1, 0)


def test_arrays_are_the_only_feature_and_keep_their_shape():
    columns = federation()
    random = np.random.default_rng(0)
    words = random.integers(9, size=(len(columns["age"]), 5))
    options = {
        "client": "site", "target": "well", "features": ["text"], "test": "by-client",
    }  # fmt: skip
    for text in (words, words.tolist(), list(words), torch.tensor(words)):
        data = fv.FederatedData.from_table({**columns, "text": text}, **options)
        assert (data.x.dtype, data.record_shape) == (np.int64, (5,))
        assert data.assumptions == (
            "labels of 'well' were fitted on the test records, which no claim covers",
        )
    odd = words.tolist()
    odd[0] = [0.5] * 5
    assert columns["site"][0] == "s0"  # whose rows are trained on
    with pytest.raises(BadInput, match=r"row 1 of column 'text' is \[0\.5.*whole numbers of shape"):
        fv.FederatedData.from_table({**columns, "text": odd}, **options)
    images = random.integers(256, size=(len(words), 2, 3)).astype(np.uint8)
    pixels = {"text": {"low": 0, "high": 255}}
    data = fv.FederatedData.from_table({**columns, "text": images}, **options, columns=pixels)
    assert (data.x.dtype, data.record_shape) == (np.float32, (2, 3))
    assert np.abs(data.x).max() <= 1
    beside = made({**columns, "text": images})
    assert beside.record_shape["text"] == (2, 3)
    assert len(beside.record_shape) == 4
    ragged = [row[: 4 + (k % 2)] for k, row in enumerate(words.tolist())]
    with pytest.raises(BadInput, match=r"numbers of shape \(\d,\) are needed"):
        fv.FederatedData.from_table({**columns, "text": ragged}, **options)
    with pytest.raises(BadInput, match="arrays of numbers of one shape are needed"):
        fv.FederatedData.from_table({**columns, "text": [["a", "b"]] * len(words)}, **options)


def test_predictions_of_new_rows_are_those_of_the_same_encoding():
    data = made(federation())
    again = data.schema.encode({k: v for k, v in federation().items() if k != "well"})
    assert {row.tobytes() for row in data.x} <= {row.tobytes() for row in again}
