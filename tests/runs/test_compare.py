"""Runs side by side: what is compared, and what must not be."""

import json

import pytest

from fedveil.runs.compare import differing_keys, not_comparable, opened, rows_of


@pytest.fixture
def pair(start):
    """Two directories: the recipe as it is, and changed."""

    def made(first="central", second="central", *settings):
        runs = [start(first, out="one"), start(second, *settings, out="two")]
        for run in runs:
            run.execute()
        return [run.folder for run in runs]

    return made


def test_a_row_holds_what_the_result_does(pair):
    folders = pair()
    for row, folder in zip(rows_of(opened(folders)), folders, strict=True):
        result = json.loads((folder / "result.json").read_text())
        assert row["run"] == str(folder)
        assert {name: row[name] for name in result["metrics"]} == result["metrics"]
        assert f"{result['claims'][0]['epsilon']:.4g}" in row["claim"]


def test_only_keys_that_differ_are_listed(pair):
    one, two = pair("central", "central", "clip.value=0.5", "engine.chunk=7")
    (row,) = differing_keys(opened([one, two]))
    assert row == {"key": "clip.value", str(one): "1.0", str(two): "0.5"}


@pytest.mark.parametrize(
    ("second", "settings", "remark"),
    [
        ("central", (), None),
        ("central", ("budget.delta=1e-3",), "delta is 0.0001 and 0.001"),
        ("ldp-sgd", (), "neighbours is zero-out and replace"),
        ("dp-sgd", (), "unit is client and record"),
        ("fedavg", (), None),
    ],
)
def test_epsilons_of_different_promises_are_not_compared(pair, second, settings, remark):
    found = not_comparable(opened(pair("central", second, *settings)))
    assert found == (remark and f"the epsilons are not comparable: {remark}")


def test_the_command_prints_tables(pair, cli):
    one, two = map(str, pair("central", "dp-sgd"))
    code, out, err = cli("compare", one, two)
    assert (code, err) == (0, "")
    assert "the epsilons are not comparable: unit is client and record" in " ".join(out.split())
    told = json.loads(cli("compare", one, two, "--json")[1])
    assert [row["recipe"] for row in told["runs"]] == ["central", "dp-sgd"]


def test_what_cannot_be_compared_is_refused(pair, cli, start, tmp_path):
    one, _ = map(str, pair())
    lines = [
        cli("compare", one)[2],
        cli("compare", one, one)[2],
        cli("compare", one, tmp_path)[2],
        cli("compare", one, start(out="three").folder)[2],
    ]
    wanted = ("1 run to compare", "named twice", "holds no run", "holds no run")
    for line, words in zip(lines, wanted, strict=True):
        assert words in line
        assert line.count("\n") == 1
