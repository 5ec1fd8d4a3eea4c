"""Dividing records among clients."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedveil.base.errors import BadInput
from fedveil.data.partition import Records, partition, resample, shorten_clients


def make(n, classes=10, owners=None, **said):
    """Records whose single feature is their row, so that every one can be traced."""
    random = np.random.default_rng(n)
    y = random.integers(0, classes, n) if classes else random.normal(size=n).astype(np.float32)
    return Records(
        "toy",
        np.arange(n, dtype=np.float32)[:, None],
        y,
        np.zeros((1, 1), np.float32),
        y[:1],
        classes=classes,
        record_owners=owners,
        owner_names=None if owners is None else np.array([f"w{i}" for i in range(8)]),
        **said,
    )


def rows(data):
    return data.x[:, 0].astype(int)


def arguments(kind, records, clients, alpha, shards):
    """Keyword arguments of a random but valid partition."""
    if kind == "natural":
        owners = set(records.record_owners.tolist())
        clients = min(clients, len(owners - {2}))  # w2 is held out by its name
        assume(clients and 2 in owners)
    assume(clients * (shards if kind == "shards" else 1) <= len(records.x))
    extra = {"dirichlet": {"alpha": alpha}, "shards": {"shards_per_client": shards}}
    return {"kind": kind, "clients": clients, **extra.get(kind, {})}


any_partition = given(
    kind=st.sampled_from(["iid", "shards", "dirichlet", "natural"]),
    n=st.integers(1, 200),
    clients=st.integers(1, 60),
    classes=st.integers(1, 12),
    alpha=st.sampled_from([1e-300, 1e-3, 0.1, 1.0, 100.0, 1e8]),
    shards=st.integers(1, 4),
    seed=st.integers(0, 2**64),
)


@any_partition
@settings(max_examples=300, deadline=None)
def test_every_record_goes_to_exactly_one_client(kind, n, clients, classes, alpha, shards, seed):
    records = make(n, classes, owners=np.random.default_rng(n).integers(0, 8, n))
    options = arguments(kind, records, clients, alpha, shards)
    data = partition(records, seed=seed, **options)
    data.check()
    assert data.clients == options["clients"]
    assert data.sizes.min() >= 1
    np.testing.assert_array_equal(data.y, records.y[rows(data)])
    assert len(np.unique(rows(data))) == len(rows(data))
    if kind != "natural":
        assert len(data.x) == n
        assert np.ptp(data.sizes) <= (1 if kind != "shards" else shards)


@any_partition
@settings(max_examples=100, deadline=None)
def test_the_same_arguments_give_the_same_clients(kind, n, clients, classes, alpha, shards, seed):
    records = make(n, classes, owners=np.random.default_rng(n).integers(0, 8, n))
    options = arguments(kind, records, clients, alpha, shards)
    first, second = (partition(records, seed=seed, **options) for _ in range(2))
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize(
    ("kind", "extra"),
    [("iid", {}), ("shards", {"shards_per_client": 2}), ("dirichlet", {"alpha": 1.0})],
)
def test_another_seed_gives_other_clients(kind, extra):
    first, second = (
        partition(make(100), kind=kind, clients=10, seed=seed, **extra) for seed in (1, 2)
    )
    assert rows(first).tolist() != rows(second).tolist()


def test_iid_mixes_the_labels():
    records = make(10_000)
    data = partition(records, kind="iid", clients=10, seed=0)
    for client in range(10):
        counts = np.bincount(data.y[data.offsets[client] : data.offsets[client + 1]])
        assert counts.min() > 60


@pytest.mark.parametrize("classes", [0, 10])
def test_one_shard_each_is_sorted_by_target_whatever_the_seed(classes):
    records = make(103, classes)
    data = partition(records, kind="shards", clients=10, seed=1)
    np.testing.assert_array_equal(rows(data), np.argsort(records.y, kind="stable"))
    other = partition(records, kind="shards", clients=10, seed=2)
    assert data.fingerprint == other.fingerprint


def test_two_shards_each_hold_few_labels():
    records = make(2000)
    data = partition(records, kind="shards", clients=20, seed=3, shards_per_client=2)
    labels = [
        len(np.unique(data.y[data.offsets[k] : data.offsets[k + 1]])) for k in range(data.clients)
    ]
    assert max(labels) <= 4
    assert max(labels) > 1


def test_smaller_alpha_means_fewer_labels_per_client():
    def labels(alpha):
        data = partition(make(5000), kind="dirichlet", clients=50, seed=0, alpha=alpha)
        cuts = data.offsets
        shares = [
            np.bincount(data.y[cuts[k] : cuts[k + 1]]).max() / data.sizes[k]
            for k in range(data.clients)
        ]
        return np.mean(shares)

    assert labels(0.01) > labels(0.3) + 0.2
    assert labels(0.3) > labels(100.0) + 0.2


def test_dirichlet_follows_the_drawn_mix_when_nothing_runs_out():
    """With one client served from plenty, the share of the largest label is Dirichlet's own."""
    shares = []
    records = make(3000, classes=3)
    for seed in range(40):
        data = partition(records, kind="dirichlet", clients=30, seed=seed, alpha=0.5)
        shares.append(np.bincount(data.y[:100], minlength=3).max() / 100)
    expected = np.random.default_rng(0).dirichlet([0.5] * 3, 20_000).max(axis=1).mean()
    assert np.mean(shares) == pytest.approx(expected, abs=0.07)


OWNERS = np.array([5, 0, 5, 2, 0, 5])  # w2 is held out by its name


def test_natural_keeps_owners_and_their_names():
    data = partition(make(6, owners=OWNERS), kind="natural", clients=None, seed=0, test="records")
    assert [data.client_name(k) for k in range(data.clients)] == ["w0", "w2", "w5"]
    assert data.sizes.tolist() == [2, 1, 3]
    assert rows(data).tolist() == [1, 4, 3, 0, 2, 5]


def test_natural_with_fewer_clients_depends_on_the_seed():
    records = make(6, owners=OWNERS)
    chosen = {
        tuple(partition(records, kind="natural", clients=2, seed=s, test="records").names.tolist())
        for s in range(20)
    }
    assert chosen == {("w0", "w2"), ("w0", "w5"), ("w2", "w5")}
    held = {partition(records, kind="natural", clients=1, seed=s).names[0] for s in range(20)}
    assert len(held) == 2


def owned(seed=0, **options):
    """Eight owners of ten training and three test records each; test record i is row 1000 + i."""
    owners, test = np.arange(80) % 8, np.arange(24) % 8
    records = replace(
        make(80, owners=owners),
        test_x=1000 + np.arange(24, dtype=np.float32)[:, None],
        test_y=np.zeros(24, dtype=np.int64),
        test_owners=test,
    )
    return partition(records, kind="natural", clients=None, seed=seed, **options)


def test_natural_holds_owners_out_and_tests_on_all_their_records_and_nobody_elses():
    data = owned()
    tested = data.test_x[:, 0].astype(int)
    assert data.clients == 7
    assert {row % 8 for row in rows(data)} | {row % 8 for row in tested} == set(range(8))
    assert not {row % 8 for row in rows(data)} & {row % 8 for row in tested}
    assert len(tested) == 10 + 3
    assert (tested >= 1000).sum() == 3
    assert not data.test_of_clients
    assert data.assumptions == ()


def test_who_is_held_out_does_not_depend_on_the_seed_nor_on_who_was_drawn():
    """Otherwise one run's test split would be another run's clients."""
    tests = {tuple(owned(seed).test_x[:, 0]) for seed in range(20)}
    assert len(tests) == 1
    names = {tuple(owned(seed).names) for seed in range(20)}
    assert len(names) == 1
    records = make(80, owners=np.arange(80) % 8)
    for seed in range(20):
        few = resample(records, 400, seed)
        assert set(partition(few, kind="natural", clients=None, seed=seed).names) == set(*names)


def test_a_fifth_of_the_owners_is_held_out():
    names = np.array([f"w{i}" for i in range(455)])
    records = replace(make(910, owners=np.arange(910) % 455), owner_names=names)
    data = partition(records, kind="natural", clients=None, seed=1)
    held = 455 - data.clients
    assert 0.15 < held / 455 < 0.25
    assert len(data.test_x) == 2 * held
    half = replace(make(456, owners=np.arange(456) % 228), owner_names=names[:228])
    fewer = partition(half, kind="natural", clients=None, seed=1)
    assert set(fewer.names) == set(names[:228]) & set(data.names)
    (one,) = (partition(make(6, owners=np.zeros(6, dtype=int)), kind="natural", clients=None,
                        seed=0, test="records"),)  # fmt: skip
    assert one.clients == 1
    for owner, message in ((0, "no name falls into"), (2, r"one owner, .* leaves no client: use")):
        with pytest.raises(BadInput, match=message):
            partition(make(6, owners=np.full(6, owner)), kind="natural", clients=None, seed=0)


def test_the_sources_own_split_says_that_clients_are_in_it():
    data = owned(test="records")
    assert (data.clients, len(data.test_x), data.test_of_clients) == (8, 24, True)
    (said,) = data.test_assumptions
    assert said.startswith("test records of the clients themselves are measured in the clear")
    with pytest.raises(BadInput, match=r"secure.* hold clients out \(data.test = 'by-client'\)"):
        data.check_secure()
    unknown = partition(make(6, owners=OWNERS), kind="natural", clients=None, seed=0,
                        test="records")  # fmt: skip
    assert unknown.test_of_clients


def test_what_was_fitted_is_carried_along():
    records = make(50, owners=np.arange(50) % 8, fitted="means")
    drawn = resample(records, 40, seed=1)
    for kind, clients in (("iid", 5), ("shards", 5), ("natural", None)):
        data = shorten_clients(partition(drawn, kind=kind, clients=clients, seed=1), 3, seed=1)
        assert data.fitted == "means"


def test_natural_with_all_owners_is_the_same_as_without_a_number():
    records = make(6, owners=OWNERS)
    everyone = partition(records, kind="natural", clients=2, seed=9)
    assert (
        everyone.fingerprint == partition(records, kind="natural", clients=None, seed=0).fingerprint
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "random"}, "'random' is unknown: use one of iid, shards, dirichlet, natural"),
        ({"kind": "iid", "clients": None}, "clients is None: give a number from 1 to 6"),
        ({"kind": "iid", "clients": 0}, "clients is 0"),
        ({"kind": "iid", "clients": -2}, "clients is -2"),
        ({"kind": "iid", "clients": 7}, "7 clients for 6 training records"),
        ({"kind": "iid", "seed": -1}, "seed -1 is negative"),
        ({"kind": "iid", "alpha": 1.0}, "alpha 1.0 has no effect on partition 'iid'"),
        ({"kind": "iid", "shards_per_client": 2}, "shards_per_client 2 has no effect"),
        ({"kind": "shards", "shards_per_client": 0}, "shards_per_client is 0"),
        ({"kind": "shards", "shards_per_client": 4}, r"8 shards \(2 clients x 4\) for 6"),
        ({"kind": "dirichlet"}, "alpha is None"),
        ({"kind": "dirichlet", "alpha": 0.0}, "alpha is 0.0"),
        ({"kind": "dirichlet", "alpha": float("nan")}, "alpha is nan"),
        ({"kind": "dirichlet", "alpha": float("inf")}, "alpha is inf"),
        ({"kind": "natural", "clients": 3}, "3 clients: toy has 2 owners beside 1 held out for"),
        ({"kind": "natural", "clients": 0}, "0 clients: toy has 2 owners beside 1 held out for"),
        ({"kind": "natural", "clients": 4, "test": "records"}, "4 clients: toy has 3 owners, use"),
        ({"kind": "natural", "test": "half"}, "test is 'half': use one of by-client, records"),
        ({"kind": "iid", "test": "by-client"}, "test 'by-client' has no effect on partition 'iid'"),
    ],
)
def test_refusals(arguments, message):
    records = make(6, owners=OWNERS)
    with pytest.raises(BadInput, match=message):
        partition(records, **{"clients": 2, "seed": 0, **arguments})


def test_dirichlet_of_a_regression():
    with pytest.raises(BadInput, match=r"toy has no labels.*use shards"):
        partition(make(6, classes=0), kind="dirichlet", clients=2, seed=0, alpha=1.0)


def test_natural_without_owners_names_the_data_sets_that_have_them():
    with pytest.raises(BadInput, match=r"toy does not say whose its records are \(femnist"):
        partition(make(6), kind="natural", clients=None, seed=0)


def test_resampled_records_are_drawn_with_replacement():
    records = make(50, owners=np.arange(50) % 8)
    drawn = resample(records, 400, seed=3)
    found = drawn.x[:, 0].astype(int)
    assert len(found) == 400
    assert set(found) <= set(range(50))
    assert np.bincount(found, minlength=50).max() > 8
    np.testing.assert_array_equal(drawn.y, records.y[found])
    np.testing.assert_array_equal(drawn.record_owners, records.record_owners[found])
    assert drawn.test_x is records.test_x
    counts = np.bincount(resample(records, 50_000, seed=1).x[:, 0].astype(int), minlength=50)
    assert counts.min() > 800
    assert counts.max() < 1200


def test_resampling_depends_on_the_seed_alone():
    records = make(50)
    first, again, other = (resample(records, 60, seed=seed).x for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_resampled_records_can_be_divided_among_more_clients_than_there_were():
    data = partition(resample(make(50), 400, seed=1), kind="shards", clients=100, seed=1)
    assert data.sizes.tolist() == [4] * 100
    assert (np.diff(data.y) >= 0).all()


def test_nothing_can_be_drawn():
    with pytest.raises(BadInput, match="resample is 0"):
        resample(make(5), 0, seed=1)


@pytest.mark.parametrize("most", [1, 3, 100])
def test_shortened_clients_keep_some_of_their_own_records(most):
    owners = np.array([0] * 10 + [3] * 2 + [5] * 4)
    records = make(16, owners=owners)
    whole = partition(records, kind="natural", clients=None, seed=0, test="records")
    short = shorten_clients(whole, most, seed=7)
    short.check()
    assert short.sizes.tolist() == [min(size, most) for size in (10, 2, 4)]
    assert [short.client_name(k) for k in range(3)] == ["w0", "w3", "w5"]
    for k in range(3):
        mine = rows(short)[short.offsets[k] : short.offsets[k + 1]]
        theirs = rows(whole)[whole.offsets[k] : whole.offsets[k + 1]]
        assert set(mine) <= set(theirs)
        assert len(set(mine)) == len(mine)
    np.testing.assert_array_equal(short.y, make(16, owners=owners).y[rows(short)])


def test_shortening_chooses_by_the_seed():
    whole = partition(make(100), kind="iid", clients=5, seed=0)
    first, again, other = (shorten_clients(whole, 4, seed=seed).fingerprint for seed in (1, 1, 2))
    assert first == again != other


def test_joined_data_forget_no_shortening_and_declare_no_private_number():
    whole = partition(make(100), kind="iid", clients=5, seed=0)
    four, nine = whole.shortened(4), whole.shortened(9)
    assert whole.concatenated(whole).most_records is None
    assert four.concatenated(nine).most_records == nine.concatenated(four).most_records == 9
    for first, other in ((four, whole), (whole, four)):
        with pytest.raises(BadInput, match=r"most_records is 4 cannot.*use data.shortened\(4\) on"):
            first.concatenated(other)


def test_no_client_can_be_without_records():
    whole = partition(make(10), kind="iid", clients=5, seed=0)
    with pytest.raises(BadInput, match="most_records is 0"):
        shorten_clients(whole, 0, seed=1)


def named(count, changed=(), seed=0, clients=5):
    """Owners n0 ... with two records each, without those that are `changed`."""
    owners = np.repeat(np.setdiff1d(np.arange(count), changed), 2)
    names = np.array([f"n{k}" for k in range(count)])
    records = replace(
        make(len(owners)), record_owners=owners, owner_names=names, x=owners[:, None] * 1.0
    )
    return partition(records, kind="grouped", clients=clients, seed=seed)


def members(data):
    return [set(part.tolist()) for part in np.split(rows(data), data.offsets[1:-1])]


def test_groups_have_whole_owners_and_nobody_twice():
    data = named(100)
    groups = members(data)
    assert (data.clients, sum(map(len, groups))) == (5, len(set().union(*groups)))
    assert data.sizes.tolist() == [2 * len(group) for group in groups]
    held = set(data.test_x[:, 0].astype(int).tolist())
    assert held.isdisjoint(set().union(*groups))
    assert held | set().union(*groups) == set(range(100))
    assert not data.test_of_clients
    assert members(named(100, seed=1)) != groups


def test_an_owner_who_leaves_moves_nobody_else():
    before, after = members(named(100)), members(named(100, changed=[37]))
    assert [group - {37} for group in before] == after


def test_groups_are_of_about_one_size():
    sizes = named(5000, clients=4).sizes / 2  # binomial(about 4000, 1/4), 4000/4 +- 6 x 27.4
    assert abs(sizes - sizes.mean()).max() < 165  # false alarms: below 1e-7


def test_claims_say_that_clients_are_groups_and_what_an_owner_gets():
    (said,) = named(100).assumptions
    assert said.startswith("clients are 5 groups of owners, merged at random: a claim per client")
    assert "one owner's records in it replace what the client sends" in said


def test_claims_say_that_owners_are_scattered():
    data = partition(make(6, owners=OWNERS), kind="iid", clients=3, seed=0)
    assert data.assumptions == (
        "records of one owner are dealt to several clients: a claim per client is not about an "
        "owner",
    )
    assert partition(make(6), kind="iid", clients=3, seed=0).assumptions == ()


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (None, "clients is None: a grouped partition needs a number"),
        (0, "clients is 0: a grouped partition needs a number"),
        (70, r"\d+ of 70 clients have none of \d+ owners: use fewer clients"),
    ],
)
def test_numbers_of_groups_that_cannot_be_are_refused(clients, message):
    with pytest.raises(BadInput, match=message):
        named(50, clients=clients)
