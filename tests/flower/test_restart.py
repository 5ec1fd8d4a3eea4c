"""A federation's server that is stopped, killed and started again."""

import contextlib
import json
from dataclasses import replace

import pytest
import torch

from fedveil.base.errors import BadInput, LedgerMismatch
from fedveil.flower.federation_server import RoundLog
from fedveil.privacy.ledger.file import read_charges
from fedveil.runs.run import Run
from fedveil.training.server import SgdServer
from tests.flower.conftest import AT_SITES, FREE, NAMES, SECURE, SEEDED, proven, stop_after
from tests.flower.sites import CENTRAL, FEDAVG, LOCAL, POLICY, is_answer, open_site
from tests.flower.sites import Server as Asker
from tests.flower.sites import charges as charges_of
from tests.flower.transports import Killed, changed

AT_SERVER = {**CENTRAL, "sample": {"kind": "all"}, "noise": SECURE, "budget": FREE}
AT_SITE = {**LOCAL, "noise": AT_SITES, "budget": FREE}


@pytest.mark.parametrize("recipe", [AT_SERVER, {**AT_SERVER, "noise": SEEDED}, AT_SITE, FEDAVG])
@pytest.mark.parametrize("end", [KeyboardInterrupt, Killed])
def test_a_server_that_was_killed_asks_the_same_again_and_nothing_is_charged_twice(
    stand_ins, recipe, end
):
    three = stand_ins({**recipe, "rounds": 4})
    three.transport.stop = (3, "south")
    three.transport.end = end
    with contextlib.suppress(Killed):
        assert three.server().serve()["rounds"] == 2
    assert (three.folder / "run" / "result.json").exists() is (end is KeyboardInterrupt)
    three.transport.stop = None
    before = {name: len(sent) for name, sent in three.transport.sent.items()}
    result = three.server().serve()
    assert result["rounds"] == 4
    places = [(ask.round, ask.attempt) for ask in three.transport.asks]
    assert places == [(1, 0), (2, 0), (3, 0), (3, 0), (4, 0)]
    assert len({ask.run for ask in three.transport.asks}) == 1
    assert three.transport.asks[2].digest == three.transport.asks[3].digest
    logged = [line for line in lines_of(three) if "asking" in line]
    assert [(line["asking"], line["attempt"]) for line in logged] == [(k, 0) for k in (1, 2, 3, 4)]
    assert three.outcomes[-2].answered == list(NAMES)
    assert before == {"north": 3, "south": 2, "west": 2}
    if result["claims"]:
        charges = read_charges(three.folder / "run" / "ledger.db")
        assert [(c.round, c.attempt) for c in charges] == [(1, 0), (2, 0), (3, 0), (4, 0)]
        line = three.server().run.training.plan.lines[0]
        assert result["claims"][0]["epsilon"] == pytest.approx(line.claims(4)[0].epsilon, rel=1e-9)


def lines_of(three):
    text = (three.folder / "run" / "sites.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def write_lines(three, lines):
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (three.folder / "run" / "sites.jsonl").write_text(text)


@pytest.mark.parametrize("recipe", [AT_SERVER, {**AT_SERVER, "noise": SEEDED}, AT_SITE, FEDAVG])
def test_a_round_whose_reports_were_summed_is_a_new_attempt_with_a_new_charge(stand_ins, recipe):
    """Its noise may have been drawn, and somebody may have seen what it came to."""
    three = stand_ins({**recipe, "rounds": 4})
    three.server().serve(stop_after(3))
    for file in (three.folder / "run" / "checkpoint").glob("*3*"):
        file.unlink()
    result = three.server().serve()
    places = [(ask.round, ask.attempt) for ask in three.transport.asks]
    assert places == [(1, 0), (2, 0), (3, 0), (3, 1), (4, 0)]
    if result["claims"]:
        charges = read_charges(three.folder / "run" / "ledger.db")
        assert [(c.round, c.attempt) for c in charges] == places
        line = three.server().run.training.plan.lines[0]
        kept, five = line.epsilon_if_ended(5, 4, extra_attempts=1), line.claims(5)[0].epsilon
        assert result["claims"][0]["epsilon"] == pytest.approx(kept, rel=1e-9)
        assert result["claims"][-1]["epsilon"] == pytest.approx(five, rel=1e-9)
        assert proven(three) == result["claims"][0]["epsilon"]


@pytest.mark.parametrize(
    "change",
    [
        {"ask": "0" * 64},
        {"ask": None},
        {"sites": ["nobody"]},
        {"attempt": 7},
    ],
)
def test_an_attempt_that_is_not_this_one_does_not_go_on(stand_ins, change):
    """Another model, a site that is none, an attempt that was not charged last."""
    three = stand_ins({**AT_SITE, "rounds": 3})
    three.transport.stop = (2, "south")
    three.server().serve()
    *before, last = lines_of(three)
    write_lines(three, [*before, {**last, **change}])
    three.transport.stop = None
    three.server().serve()
    charges = read_charges(three.folder / "run" / "ledger.db")
    assert [(c.round, c.attempt) for c in charges] == [(1, 0), (2, 0), (2, 1), (3, 0)]


def test_an_ask_that_the_ledger_does_not_know_is_charged(stand_ins):
    """As where the ledger was put back, and the log of asks was not."""
    three = stand_ins({**AT_SITE, "rounds": 3})
    three.transport.stop = (2, "south")
    three.server().serve()
    *before, last = lines_of(three)
    later = replace(three.transport.asks[-1], attempt=7)
    write_lines(three, [*before, {**last, "attempt": 7, "ask": later.digest}])
    three.transport.stop = None
    three.server().serve()
    charges = read_charges(three.folder / "run" / "ledger.db")
    assert [(c.round, c.attempt) for c in charges] == [(1, 0), (2, 0), (2, 1), (3, 0)]
    assert [(ask.round, ask.attempt) for ask in three.transport.asks[2:]] == [(2, 1), (3, 0)]


def test_a_cohort_that_was_drawn_is_asked_again_and_no_other(stand_ins):
    """With secure noise another one would be drawn, and the round would be a second sample."""
    recipe = {**CENTRAL, "noise": SECURE, "budget": FREE, "rounds": 12}
    recipe["sample"] = {"kind": "fixed", "size": 1}
    three = stand_ins(recipe)
    for _ in range(12):
        three.transport.stop = (len(three.outcomes) + 1, "north")
        three.server().serve()
        three.transport.stop = None
        three.server().serve(stop_after(1))
    logged = [line for line in lines_of(three) if "asking" in line]
    assert [line["asking"] for line in logged] == list(range(1, 13))
    assert [[*o.answered] for o in three.outcomes] == [line["sites"] for line in logged]


def test_a_site_answers_the_same_ask_with_the_same_answer_and_no_other_ask(tmp_path):
    site = open_site(tmp_path / "north")
    server = Asker(site)
    first, ask = server.answer(), server.ask()
    again = open_site(tmp_path / "north").answer(ask)
    assert torch.equal(first.report, again.report)
    assert (again.run, again.round, again.attempt, again.site) == (ask.run, 1, 0, "north")
    assert charges_of(site) == 1
    for change in (
        {"params": ask.params + 1e-3},
        {"moving": ask.moving * (1 + 1e-9)} if len(ask.moving) else {"params": ask.params * 2},
        {"params": -ask.params - 1.0},
    ):
        assert not is_answer(server.answer(**change))
    assert charges_of(site) == 1
    assert is_answer(server.answer(2))
    assert not is_answer(site.answer(ask))
    assert charges_of(site) == 2
    path = tmp_path / "north" / "ledger" / "answer.safetensors"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [b"", b"x" * 200, None])
def test_an_answer_that_is_damaged_or_gone_is_not_made_again(tmp_path, damage):
    site = open_site(tmp_path / "north")
    server = Asker(site)
    assert is_answer(server.answer())
    path = tmp_path / "north" / "ledger" / "answer.safetensors"
    path.unlink() if damage is None else path.write_bytes(damage)
    assert not is_answer(server.answer())
    assert charges_of(site) == 1


def test_a_policy_that_was_changed_keeps_a_kept_answer(tmp_path):
    site = open_site(tmp_path / "north")
    ask = Asker(site).ask()
    assert is_answer(site.answer(ask))
    strict = open_site(tmp_path / "north", policy={**POLICY, "trust": ["central"]})
    assert not is_answer(strict.answer(ask))


def test_a_second_attempt_shares_neither_noise_nor_cohort_with_the_first(stand_ins):
    """Seeded, a round is drawn anew: other sites may answer, and shared noise would cancel."""
    three = stand_ins({**CENTRAL, "noise": SEEDED, "rounds": 12, "budget": FREE})
    three.transport.behaviour = dict.fromkeys(NAMES, changed(report=lambda a: a.report * 0))
    losses = []
    for _ in range(2):
        losses.append([])
        three.server().serve(lambda line: losses[-1].append(line["loss"]))
        for file in (three.folder / "run" / "checkpoint").glob("*"):
            file.unlink()
        (three.folder / "run" / "report.html").unlink()  # otherwise nothing is left to do
    first, second = three.outcomes[:12], three.outcomes[12:]
    assert [outcome.attempt for outcome in second] == [1] * 12
    assert [o.invited for o in first] != [o.invited for o in second]
    assert not set(losses[0]) & set(losses[1])


def test_a_finished_run_is_not_run_again(stand_ins):
    three = stand_ins({**AT_SITE, "rounds": 2})
    three.server().serve()
    before = three.model("run")
    assert three.server().serve()["rounds"] == 2
    assert len(three.transport.asks) == 2
    assert torch.equal(three.model("run"), before)


def test_another_recipe_or_other_sites_do_not_resume_a_run(stand_ins):
    three = stand_ins({**AT_SITE, "rounds": 3})
    three.server().serve(stop_after(1))
    with pytest.raises(BadInput, match="another recipe"):
        three.server(recipe={**three.recipe, "clip": {"kind": "fixed", "value": 0.4}})
    said = json.loads((three.folder / "run" / "federation.json").read_text())
    (three.folder / "run" / "federation.json").write_text(json.dumps({**said, "plan": 3}))
    with pytest.raises(BadInput, match="another recipe"):
        three.server()


def test_a_federated_run_is_not_resumed_by_the_simulator(stand_ins):
    three = stand_ins({**AT_SITE, "rounds": 3})
    three.server().serve(stop_after(1))
    with pytest.raises(LedgerMismatch):
        Run.resume(three.folder / "run", None).execute()


def test_a_line_that_a_crash_cut_off_is_no_ask(stand_ins):
    three = stand_ins({**FEDAVG, "rounds": 1})
    three.transport.stop = (1, "south")
    three.server().serve()
    with (three.folder / "run" / "sites.jsonl").open("a") as file:
        file.write('{"asking": 1, "att')  # a crash in the middle of a line
    three.transport.stop = None
    three.server().serve()
    assert [ask.attempt for ask in three.transport.asks] == [0, 0]


def test_an_outcome_that_a_crash_cut_off_ends_its_attempt(tmp_path):
    """Its noise may be drawn: the round is asked again, and charged again."""
    log = RoundLog(tmp_path)
    log.append({"asking": 1, "attempt": 0})
    assert log.unfinished(1) == {"asking": 1, "attempt": 0}
    with (tmp_path / "sites.jsonl").open("a") as file:
        file.write('{"round": 1, "att')
    assert log.unfinished(1) is None
    log.append({"asking": 1, "attempt": 1})
    assert log.unfinished(1) == {"asking": 1, "attempt": 1}
    assert log.attempts(1) == 2


def test_two_runs_of_one_recipe_share_no_noise(stand_ins):
    """Sites may have other records by then, and the noise would cancel in the difference."""
    three = stand_ins({**AT_SERVER, "noise": SEEDED, "rounds": 1})
    three.server("one").serve()
    three.server("other").serve()
    assert not torch.equal(three.model("one"), three.model("other"))


def test_a_start_that_went_no_further_is_started_anew(stand_ins):
    three = stand_ins({**AT_SITE, "rounds": 1})
    three.server()
    (three.folder / "run" / "recipe.toml").unlink(missing_ok=True)
    assert three.server().serve()["rounds"] == 1


def test_a_run_that_has_lost_its_name_is_not_resumed(stand_ins):
    three = stand_ins({**AT_SITE, "rounds": 2})
    three.server().serve(stop_after(1))
    (three.folder / "run" / "federation.json").unlink()
    with pytest.raises(BadInput, match="is missing"):
        three.server()


def test_a_server_of_other_parts_does_not_resume_a_run(stand_ins, monkeypatch):
    three = stand_ins({**AT_SITE, "rounds": 3})
    three.server().serve(stop_after(1))
    monkeypatch.setattr(SgdServer, "identity", property(lambda self: (("server", "other"),)))
    with pytest.raises(LedgerMismatch, match="finish it with the version"):
        three.server().serve()
    assert len(three.transport.asks) == 1
