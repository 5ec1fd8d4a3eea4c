"""Several files as one table: files as clients, columns, and where each row comes from."""

import numpy as np
import pytest

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.data.own_table import TableOptions, split_table
from fedveil.data.tables import read_table
from fedveil.runs.recipe import load_recipe, to_toml

HEADER = "ward,age,well"
COLUMNS = {
    "age": {"low": 0, "high": 100},
    "ward": {"values": ["a", "b"]},
    "well": {"values": ["no", "yes"]},
}
NAMES = ["north", "south", "west"]


def lines(seed, count=8):
    random = np.random.default_rng(seed)
    return [
        f"{random.choice(['a', 'b'])},{random.uniform(0, 100):.6f},{('no', 'yes')[k % 2]}"
        for k in range(count)
    ]


def write(path, rows, header=HEADER):
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sites").mkdir()
    return [write(tmp_path / "sites" / f"{name}.csv", lines(k)) for k, name in enumerate(NAMES)]


def made(table, **options):
    return fv.FederatedData.from_table(table, target="well", columns=COLUMNS, **options)


def same(one, other):
    return one.fingerprint == other.fingerprint and one.names.tolist() == other.names.tolist()


def refusal(call):
    with pytest.raises(BadInput) as refused:
        call()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_each_file_is_a_client_called_as_the_file(files):
    data = made(files)
    assert (data.names.tolist(), data.sizes.tolist()) == (NAMES, [8, 8, 8])
    alone = made(files[1], clients=1)
    rows = slice(data.offsets[1], data.offsets[2])
    assert sorted(data.x[rows].tolist()) == sorted(alone.x.tolist())
    assert same(data, made("sites"))
    assert same(data, made(files[::-1]))
    assert data.schema.record_shape == (3,)  # the name of the file is no feature


def test_the_same_from_a_recipe_that_is_saved(files, tmp_path):
    settings = ["data.target=well", f"data.columns={to_toml_inline(COLUMNS)}", "data.test=none"]
    listed = load_recipe("central", [f"data.path={files}", *settings])
    (tmp_path / "saved.toml").write_text(to_toml(listed.model_dump(exclude_none=True)))
    folder = load_recipe("central", ["data.path=sites", *settings])
    for recipe in (listed, load_recipe(str(tmp_path / "saved.toml")), folder):
        section = recipe.data
        assert same(section.divide(section.load(), recipe.seed), made(files))
        assert section.seedless
        assert section.by_file


def to_toml_inline(columns):
    """Declarations as one value of TOML."""
    return to_toml({"x": 0, "columns": {"inner": columns}}).split("inner = ")[1].strip()


def test_with_a_client_column_the_rows_of_all_files_are_one_table(files, tmp_path):
    everyone = [line for k in range(3) for line in lines(k)]
    whole = write(tmp_path / "all.csv", everyone)
    columns = {key: value for key, value in COLUMNS.items() if key != "ward"}
    options = {"target": "well", "client": "ward", "columns": columns}
    together = fv.FederatedData.from_table(files, **options)
    assert same(together, fv.FederatedData.from_table(whole, **options))
    assert together.names.tolist() == ["a", "b"]


def test_rows_of_several_files_may_be_dealt(files):
    data = made(files, partition="iid", clients=4)
    assert (data.clients, data.records) == (4, 24)
    assert made(files, clients=2).clients == 2  # two of the three files
    assert set(made(files, clients=2).names) < set(NAMES)


@pytest.mark.parametrize("client", [None, "ward"])
@pytest.mark.parametrize("copied", [False, True])
def test_one_of_the_files_as_test_rows_is_its_client_s_own(files, tmp_path, client, copied):
    tested = files[1]
    if copied:
        tested = write(tmp_path / "public.csv", lines(1))
    columns = {key: value for key, value in COLUMNS.items() if key != client}
    options = {"target": "well", "columns": columns, "client": client}
    data = fv.FederatedData.from_table(files, test=tested, **options)
    assert (data.owners_of_test >= 0).all()
    if client is None:
        assert set(data.owners_of_test) == {NAMES.index("south")}
    assert data.test_assumptions[0].startswith("test records of the clients themselves are")
    with pytest.raises(BadInput, match="test records are the clients' own"):
        data.check_secure()
    dealt = made(files, partition="iid", clients=4, test=tested)
    assert len(dealt.test_y) == 8
    assert (dealt.owners_of_test >= 0).all()


def test_rows_are_known_by_file_and_line_and_not_by_place(files):
    table = read_table(files)
    part = read_table(files[2])
    assert part.numbers_in(table).tolist() == [*range(17, 25)]
    assert table.numbers_in(part).tolist() == [-1] * 16 + [*range(1, 9)]
    some = table.take(np.array([20, 3]))
    assert some.numbers_in(table).tolist() == [21, 4]
    assert some.row_numbers.tolist() == [5, 4]
    assert part.take(np.array([4])).numbers_in(some).tolist() == [21]


def test_another_file_as_test_rows_is_one_owner_who_is_held_out(files, tmp_path):
    other = write(tmp_path / "east.csv", lines(9))
    data = made(files, test=other)
    assert (data.owners_of_test < -1).all()
    assert data.held_out_owners == 1
    assert data.test_assumptions == (
        "1 owner is held out of 4 for testing, measured in the clear, and not protected by this "
        "claim",
    )
    named = made(files, test=write(tmp_path / "north.csv", lines(8)))
    assert set(named.owners_of_test) == {0}  # of a client's name: taken for the client's own


def test_whole_files_are_held_out_by_name(files):
    split = split_table(
        read_table(files).with_file_names(), TableOptions("well", test="by-client", by_file=True)
    )
    tested = set(split.test_rows["file"])
    assert tested
    assert tested.isdisjoint(split.train_rows["file"])
    data = made(files, test="by-client")
    assert {*data.names, *tested} == set(NAMES)


def test_a_missing_and_an_extra_column_are_named_with_their_file(files, tmp_path):
    short = [line.rpartition(",")[0] for line in lines(4)]
    write(tmp_path / "sites" / "zoo.csv", short, "ward,age")
    assert refusal(lambda: made("sites")) == (
        "sites/zoo.csv has no column 'well', unlike the 3 other files: add it"
    )
    write(tmp_path / "sites" / "zoo.csv", [f"{line},1" for line in lines(4)], f"{HEADER},bmi")
    assert refusal(lambda: made("sites")) == (
        "sites/zoo.csv has a column 'bmi', unlike the 3 other files: remove it"
    )
    write(tmp_path / "sites" / "zoo.csv", [f"{line},1" for line in short], "ward,age,bmi")
    line = refusal(lambda: made("sites"))
    assert line.startswith("sites: 2 problems: (1) sites/zoo.csv has no column 'well', unlike")
    assert "(2) sites/zoo.csv has a column 'bmi', unlike the 3 other files: remove it" in line


def test_an_entry_is_named_by_its_file_and_its_row_there(files, tmp_path):
    write(tmp_path / "sites" / "south.csv", [*lines(1)[:3], "a,old,no"])
    line = refusal(lambda: made("sites"))
    assert line.startswith("sites/south.csv: row 4 of column 'age' is 'old': a number is needed")


def test_all_files_that_cannot_be_read_are_named(files, tmp_path):
    (tmp_path / "sites" / "north.csv").write_text("")
    (tmp_path / "sites" / "west.csv").write_bytes(b"\x00\x01")
    assert refusal(lambda: made("sites")) == (
        "sites: 2 problems: (1) sites/north.csv is empty: a header and rows are needed; (2) "
        "sites/west.csv is no text: a CSV file in UTF-8 is needed"
    )


def test_the_same_file_twice_is_refused(files, tmp_path):
    assert refusal(lambda: made([*files, files[0]])) == (
        f"{files[0]} and {files[0]} are the same file: leave one out"
    )
    copy = write(tmp_path / "copy.csv", lines(0))
    assert refusal(lambda: made([*files, copy])) == (
        f"{copy} and {files[0]} are the same file: leave one out"
    )


def test_names_of_clients_are_unique_and_no_column_is_hidden(files, tmp_path):
    again = write(tmp_path / "north.csv", lines(7))
    line = refusal(lambda: made([*files, again]))
    assert line.startswith("2 files are called 'north', and each file is a client of that name")
    columns = {key: value for key, value in COLUMNS.items() if key != "ward"}
    options = {"target": "well", "client": "ward", "columns": columns}
    assert fv.FederatedData.from_table([*files, again], **options).clients == 2
    header = "file,age,well"
    both = [write(tmp_path / f"{k}.csv", lines(k), header) for k in range(2)]
    assert "there is a column 'file', and without a client column each file" in refusal(
        lambda: fv.FederatedData.from_table(both, target="well")
    )
    named = fv.FederatedData.from_table(both, target="well", client="file", columns=columns)
    assert named.names.tolist() == ["a", "b"]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "the list of files is empty: name at least one .csv or .parquet file"),
        ([3], "the list of files has 3: name .csv or .parquet files"),
        (["sites"], "sites is a folder: name .csv or .parquet files, or one folder of them"),
        (["none.csv"], "none.csv does not exist"),
        (["a.txt"], "a.txt is no table that can be read"),
    ],
)
def test_lists_that_are_no_files_are_refused(files, paths, message):
    assert refusal(lambda: made(paths)).startswith(message)


def test_one_file_s_types_change_nothing_in_another_s(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    for name, codes in (("a", pa.array([1, 2, 3])), ("b", pa.array(["1", "x", "2"]))):
        columns = {"code": codes, "age": pa.array([1.0, 2.0, 3.0]), "well": pa.array([0, 1, 0])}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    table = read_table([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    assert table["code"].tolist() == [1, 2, 3, "1", "x", "2"]
    assert table["age"].dtype == np.float64
