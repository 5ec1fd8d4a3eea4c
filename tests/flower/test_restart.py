"""A federation's server that is stopped, killed and started again."""

import contextlib
import json

import pytest
import torch

from fedveil.base.errors import BadInput, LedgerMismatch
from fedveil.privacy.ledger.file import read_charges
from fedveil.runs.run import Run
from fedveil.training.server import SgdServer
from tests.flower.conftest import AT_SITES, FREE, NAMES, SECURE, SEEDED, proven, stop_after
from tests.flower.sites import CENTRAL, FEDAVG, LOCAL
from tests.flower.transports import Killed, changed

AT_SERVER = {**CENTRAL, "sample": {"kind": "all"}, "noise": SECURE, "budget": FREE}
AT_SITE = {**LOCAL, "noise": AT_SITES, "budget": FREE}


@pytest.mark.parametrize("recipe", [AT_SERVER, {**AT_SERVER, "noise": SEEDED}, AT_SITE, FEDAVG])
@pytest.mark.parametrize("end", [KeyboardInterrupt, Killed])
def test_a_server_that_was_killed_resumes_with_a_new_attempt_and_a_new_charge(
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
    assert places == [(1, 0), (2, 0), (3, 0), (3, 1), (4, 0)]
    assert len({ask.run for ask in three.transport.asks}) == 1
    assert three.outcomes[-2].answered == list(NAMES)
    assert before == {"north": 3, "south": 2, "west": 2}
    if result["claims"]:
        charges = read_charges(three.folder / "run" / "ledger.db")
        assert [(c.round, c.attempt) for c in charges] == places
        line = three.server().run.training.plan.lines[0]
        kept, five = line.epsilon_if_ended(5, 4, extra_attempts=1), line.claims(5)[0].epsilon
        assert result["claims"][0]["epsilon"] == pytest.approx(kept, rel=1e-9)
        assert result["claims"][-1]["epsilon"] == pytest.approx(five, rel=1e-9)
        assert proven(three) == result["claims"][0]["epsilon"]


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


def test_an_ask_is_never_called_the_same_even_if_nothing_is_charged(stand_ins):
    three = stand_ins({**FEDAVG, "rounds": 1})
    three.transport.stop = (1, "south")
    three.server().serve()
    with (three.folder / "run" / "sites.jsonl").open("a") as file:
        file.write('{"asking": 1, "att')  # a crash in the middle of a line
    three.transport.stop = None
    three.server().serve()
    assert [ask.attempt for ask in three.transport.asks] == [0, 1]


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
