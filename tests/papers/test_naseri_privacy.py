"""The last item of Naseri et al.: every defence, every attack, one table."""

import pytest

from fedveil.audit import white_box
from fedveil.audit.audit_command import AuditSettings
from fedveil.papers import naseri
from fedveil.papers.naseri import (
    ATTACKED_EPSILONS,
    BOUND,
    CENTRAL,
    LOCAL,
    NONE,
    WEAK_DP,
    PrivacyRow,
    privacy_statements,
)
from fedveil.papers.reproduction import Experiment, items_of
from fedveil.tuning.repetitions import mean_of
from tests.papers.test_naseri import SMALL

FEW = ("randomiser", "canaries", "one-run", "membership", "white-box", "property")


def small(out):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(naseri, "attacked_federations", lambda experiment: [SMALL])
        patch.setattr(white_box, "WATCHED", 2)
        few = AuditSettings(FEW, draws=1000, canaries=50, references=4, workers=1)
        patch.setattr(naseri, "audit_settings", lambda experiment, where: few)
        return naseri.privacy(Experiment(out, repeat=2, workers=1))


@pytest.fixture(scope="module", params=[pytest.param("small", marks=pytest.mark.slow)])
def page(tmp_path_factory):
    out = tmp_path_factory.mktemp("naseri")
    found = small(out)
    found.out = out
    return found


def test_it_is_the_last_item():
    assert list(items_of("naseri"))[-1] == "privacy"


def test_every_defence_and_epsilon_has_a_row_and_every_attack_a_cell(page):
    table = page.tables[0]
    private = [
        *([LOCAL] * len(ATTACKED_EPSILONS)),
        *([CENTRAL] * len(ATTACKED_EPSILONS)),
        "LDP-SGD",
    ]
    assert [row[0] for row in table.text_rows] == [NONE, BOUND, WEAK_DP, *private]
    for row in table.text_rows:
        cells = dict(zip(table.headers, row, strict=True))
        assert "+-" in cells["accuracy, %"]
        for column in ("membership AUC", "membership TPR", "white-box AUC", "property AUC"):
            assert cells[column] != "-", column
        claims = cells["claim"] != "nothing claimed"
        assert (cells["at least (95 %)"] != "-") == claims == (row[0] in private)


def test_no_epsilon_of_the_page_is_bare(page, check_epsilons):
    check_epsilons(page)


def test_a_row_that_is_done_is_not_attacked_again(page, monkeypatch):
    monkeypatch.setattr(naseri, "run_attacks", None)
    assert small(page.out).tables == page.tables


def row(defence, epsilon, membership, white_box):
    best = {"membership": membership, "white-box": white_box}
    return PrivacyRow(defence, epsilon, mean_of([50.0, 51.0]), ("-",), best)


@pytest.mark.parametrize(
    ("none", "local", "central", "seen"),
    [
        ((0.9, 0.95), (0.51, 0.52), (0.49, 0.8), [True, True, True]),
        ((0.6, 0.95), (0.56, 0.9), (0.5, 0.8), [False, False, False]),
        ((0.9, 0.8), (0.5, 0.5), (0.5, 0.51), [False, True, True]),
    ],
)
def test_what_is_to_be_seen(none, local, central, seen):
    least = ATTACKED_EPSILONS[0]
    rows = [row(NONE, "", *none), row(LOCAL, least, *local), row(CENTRAL, least, *central)]
    assert [finding.confirmed for finding in privacy_statements("Digits", rows)] == seen
