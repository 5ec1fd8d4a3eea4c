"""Runs side by side: what is compared, and what must not be."""

import json
import re

import pytest

from fedveil.runs.compare import comparison_rows, differing_keys, open_runs, verdict


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
    for row, folder in zip(comparison_rows(open_runs(folders)), folders, strict=True):
        result = json.loads((folder / "result.json").read_text())
        assert row["run"] == str(folder)
        assert {name: row[name] for name in result["metrics"]} == result["metrics"]
        assert f"{result['claims'][0]['epsilon']:.4g}" in row["claim"]


def test_only_keys_that_differ_are_listed(pair):
    one, two = pair("central", "central", "clip.value=0.5", "engine.chunk=7")
    (row,) = differing_keys(open_runs([one, two]))
    assert row == {"key": "clip.value", str(one): "1.0", str(two): "0.5"}


@pytest.mark.parametrize(
    ("second", "settings", "sentence"),
    [
        (
            "central",
            (),
            r"The promises are equally strong: epsilon 2\.098 at delta 0\.0001 .* each\.",
        ),
        (
            "central",
            ("noise.multiplier=3.0",),
            r"two makes the stronger promise: epsilon \S+ at delta .*, against 2\.098 of one\.",
        ),
        (
            "central",
            ("budget.delta=1e-3",),
            r".*: the epsilons are at different deltas \(0.0001 and ",
        ),
        ("ldp-sgd", (), ".*: the epsilons use different definitions of neighbouring data sets "),
        ("dp-sgd", (), r".*: the epsilons protect different units \(client and record\)\."),
        ("fedavg", (), r"Only one gives a guarantee: its promise is the strongest\."),
    ],
)
def test_which_promise_is_stronger_is_said_where_they_are_of_one_kind(
    pair, second, settings, sentence
):
    assert re.match(sentence, verdict(open_runs(pair("central", second, *settings))))


def test_the_command_prints_tables(pair, cli):
    one, two = map(str, pair("central", "dp-sgd"))
    code, out, err = cli("compare", one, two)
    assert (code, err) == (0, "")
    told = json.loads(cli("compare", one, two, "--json")[1])
    assert out.splitlines()[-1] == told["verdict"]
    assert "the epsilons protect different units (client and record)" in told["verdict"]
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
