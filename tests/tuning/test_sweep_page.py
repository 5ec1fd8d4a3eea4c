"""The page of a sweep, from its tables: frontiers, heat maps, the best cell of each claim."""

import csv
import itertools
import json
import re
import sys

import pytest

from fedveil.base.errors import BadInput
from fedveil.cli import main as commands
from fedveil.tuning.tuning_pages import SweepResults, sweep_page
from tests.runs.test_report import words

EPSILONS, RATES = ("2", "8", "inf"), ("0.1", "1.0")
SCRIPT = "<script>alert(1)</script>"


def write(folder, axes, rows):
    """As a sweep leaves it."""
    folder.mkdir(exist_ok=True)
    about = {"axes": axes, "repeat": 3, "together": {"notes": ["together: 18 trainings"]}}
    (folder / "sweep.json").write_text(json.dumps(about))
    with (folder / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


def cell(epsilon, rate, loss, half=0.1):
    claimed = epsilon != "inf"
    words = f"epsilon {epsilon} at delta 1e-05 per client (zero-out, central trust, PLD)"
    return {
        "budget.epsilon": epsilon, "client.lr": rate, "accuracy": 1 - loss / 10,
        "accuracy_half": half, "loss": loss, "loss_half": half,
        "epsilon": epsilon if claimed else "", "delta": "1e-05" if claimed else "",
        "unit": "client" if claimed else "", "neighbours": "zero-out" if claimed else "",
        "trust": "central" if claimed else "", "as_published": "False" if claimed else "",
        "claims": words if claimed else "",
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    losses = {"2": (3.0, 5.0), "8": (2.0, 1.0), "inf": (0.9, 0.5)}
    rows = [cell(e, r, losses[e][k]) for e in EPSILONS for k, r in enumerate(RATES)]
    axes = [["budget.epsilon", *EPSILONS], ["client.lr", *RATES]]
    return write(tmp_path / "sweep", axes, rows)


def test_the_best_cell_is_found_for_each_claim(folder):
    swept = SweepResults.from_folder(folder)
    chosen = [tuple(swept.choice_of(k).values()) for k in swept.best_cells]
    assert chosen == [("2", "0.1"), ("8", "1.0"), ("inf", "1.0")]
    text = words(sweep_page(folder))
    assert "The recommended cell for each claim" in text
    assert "--set budget.epsilon=8 --set client.lr=1.0" in text
    assert "Together: 18 trainings." in text


def test_the_frontier_has_the_best_cell_of_each_epsilon_with_its_interval(folder):
    page = sweep_page(folder).decode()
    frontier = page.partition('id="frontier-0"')[2].partition("</figure>")[0]
    assert re.findall(r"<td>([^<]*)</td>", frontier) == ["0.7 +- 0.1", "0.9 +- 0.1"]
    assert "over epsilon at delta 1e-05 per client (zero-out, central trust)" in frontier


def test_axes_are_named_in_words_and_maps_hold_every_cell(folder):
    page = sweep_page(folder).decode()
    heat = page.partition('id="map-0"')[2].partition("</figure>")[0]
    assert "learning rate of clients" in heat
    assert "epsilon of the budget" in heat
    assert heat.count("<rect") == 6


def test_one_claim_has_one_cell_in_a_frame(tmp_path):
    rows = [cell("2", r, loss) for r, loss in zip(RATES, (2.0, 1.0), strict=True)] * 2
    rows = [{**row, "rounds": n} for row, n in zip(rows, "5577", strict=True)]
    rows[3]["loss"] = "inf"
    folder = write(tmp_path / "s", [["rounds", "5", "7"], ["client.lr", *RATES]], rows)
    page = sweep_page(folder).decode()
    assert page.count('class="best"') == 1
    assert "The frame marks the recommended cell" in page
    assert SweepResults.from_folder(folder).best_cells == [1]


def test_many_axes_and_names_that_are_no_numbers(tmp_path):
    names = ("a", "b", SCRIPT)
    rows = [
        {**cell("2", r, 1.0 + k), "model.name": n, "seed": s}
        for k, (n, r, s) in enumerate(itertools.product(names, RATES, ("1", "2")))
    ]
    axes = [["model.name", *names], ["client.lr", *RATES], ["seed", "1", "2"]]
    page = sweep_page(write(tmp_path / "s", axes, rows)).decode()
    assert page.count("<script>") == 1
    assert page.count('<figure id="map-') == 2  # one for each seed


@pytest.mark.parametrize("damage", ["missing", "short", "empty", "axes", "torn"])
def test_what_is_no_whole_sweep_is_refused(folder, damage):
    table, about = folder / "summary.csv", folder / "sweep.json"
    lines = table.read_text().splitlines(keepends=True)
    match damage:
        case "missing":
            table.unlink()
        case "short":
            table.write_text("".join(lines[:-1]))
        case "empty":
            table.write_text("")
        case "axes":
            about.write_text('{"axes": 3, "repeat": 1, "together": {"notes": []}}')
        case "torn":
            about.write_text("{")
    with pytest.raises(BadInput, match="sweep"):
        sweep_page(folder)


def test_the_command_draws_it_again(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fedveil", "report", str(folder)])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert ended.value.code == 0
    assert (folder / "report.html").read_bytes() == sweep_page(folder)
    assert capsys.readouterr().out == f"written: {folder / 'report.html'}\n"
