"""Whatever arrives at a federation's server: what counts, what does not, and who is named."""

import pytest
import torch

from fedveil.flower.messages import Answer
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.clip_schedules import Median, Quantile
from fedveil.privacy.ledger.file import read_charges
from fedveil.privacy.noise.streams import Streams
from tests.flower import transports
from tests.flower.conftest import AT_SITES, FREE, NAMES, SECURE, SEEDED
from tests.flower.sites import CENTRAL, FEDAVG, LOCAL
from tests.flower.transports import HOSTILE, Arrival, changed

ALL = {"kind": "all"}
AT_SERVER = {**CENTRAL, "sample": ALL, "noise": SECURE, "budget": FREE}
ABOUT_CONTENT = ("nan", "length", "matrix", "scalar", "dtype", "whole", "watched")


def everything(stand_ins, recipe):
    """Two sites that behave, and one of every kind that does not; whoever is late comes last."""
    kinds = sorted(HOSTILE, key=lambda kind: kind == "late")
    many = stand_ins(recipe, names=["good", "fine", *kinds])
    many.transport.behaviour = {**HOSTILE, "name": changed(site="good")}
    return many


@pytest.mark.parametrize("recipe", [AT_SERVER, {**LOCAL, "noise": AT_SITES, "budget": FREE}])
def test_the_round_goes_on_without_whoever_sends_what_cannot_be_used(stand_ins, recipe):
    many = everything(stand_ins, {**recipe, "rounds": 2, "evaluate": {"diagnostics": True}})
    result = many.server().serve()
    first, last = many.outcomes
    assert result["rounds"] == 2
    assert result["refused"] == dict.fromkeys(ABOUT_CONTENT, 2)
    assert torch.isfinite(many.model("run")).all()
    assert set(last.answered) == {"good", "fine", *ABOUT_CONTENT}
    assert set(first.answered) == {"good", "fine", "replays", *ABOUT_CONTENT}
    assert last.absent == ["dies"]
    assert last.declined == {"refuses": "no budget is left"}
    assert set(last.rejected) == set(HOSTILE) - {"dies", "refuses"}
    assert len(read_charges(many.folder / "run" / "ledger.db")) == 2


def test_whoever_cannot_be_used_does_not_count(stand_ins):
    """Nothing is claimed, so the mean is over those that count, each of which moves one weight."""
    many = everything(stand_ins, {**FEDAVG, "rounds": 2})
    many.server().serve()
    first, second = (ask.params for ask in many.transport.asks)
    replays = list(many.transport.sites).index("replays")
    once = torch.zeros_like(first)
    once[[0, 1, replays]] = 0.1 / 3
    assert torch.allclose(second - first, once, atol=1e-6)
    again = torch.zeros_like(first)
    again[:2] = 0.1 / 2
    assert torch.allclose(many.model("run") - second, again, atol=1e-6)


def test_a_replay_of_an_older_answer_does_not_count(stand_ins):
    three = stand_ins({**FEDAVG, "rounds": 2})
    three.transport.behaviour["west"] = transports.replays
    three.server().serve()
    first, second = three.outcomes
    assert first.answered == list(NAMES)
    assert second.answered == ["north", "south"]
    assert "attempt 0 at round 1" in second.rejected["west"]


def test_an_answer_counts_once(stand_ins):
    three = stand_ins({**FEDAVG, "rounds": 1})
    three.transport.behaviour["west"] = transports.twice
    three.server().serve()
    moved = three.model("run") - three.transport.asks[0].params
    assert moved[:3].tolist() == pytest.approx([0.1 / 3] * 3, abs=1e-6)
    assert three.outcomes[0].rejected == {"west": "it answered twice"}


def test_who_has_declined_does_not_answer_any_more(stand_ins):
    three = stand_ins({**FEDAVG, "rounds": 1})
    three.transport.behaviour["west"] = lambda transport, ask, reply: [
        *transports.refuses(transport, ask, reply),
        Arrival("west", reply),
    ]
    three.server().serve()
    assert three.outcomes[0].answered == ["north", "south"]


def test_nobody_answers_in_the_name_of_another(stand_ins):
    three = stand_ins({**FEDAVG, "rounds": 1})
    three.transport.behaviour["north"] = changed(site="south")
    three.server().serve()
    (outcome,) = three.outcomes
    assert outcome.answered == ["south", "west"]
    assert outcome.rejected == {"north": "it answered in the name of 'south'"}


def test_who_was_not_asked_does_not_count(stand_ins):
    three = stand_ins({**FEDAVG, "rounds": 1, "sample": {"kind": "round-robin", "size": 1}})

    def everybody(transport, ask, reply):
        return [
            Arrival(name, Answer(ask.run, 1, 0, name, reply.report, reply.watched))
            for name in NAMES
        ]

    three.transport.behaviour = dict.fromkeys(NAMES, everybody)
    three.server().serve()
    (outcome,) = three.outcomes
    assert len(outcome.answered) == 1
    assert list(outcome.rejected.values()) == ["it was not asked"] * 2


@pytest.mark.parametrize("length", [0.1, 1000.0])
def test_a_report_that_is_too_long_is_clipped_by_the_server(stand_ins, length):
    recipe = {**AT_SERVER, "noise": {**SEEDED, "multiplier": 1e-3}, "rounds": 1}
    three = stand_ins({**recipe, "clip": {"kind": "fixed", "value": 0.01}}, length=length)
    three.server().serve()
    moved = three.model("run") - three.transport.asks[0].params
    assert moved[:3].tolist() == pytest.approx([0.01 / 3] * 3, rel=0.02)


@pytest.mark.parametrize(("sent", "counted"), [(0.5, 0.5), (1e3, 0.5), (-7.0, -0.5), (1e400, 0.0)])
def test_what_an_adaptive_clip_is_told_is_cut(stand_ins, sent, counted):
    """Of three bits, two say that the clip is large enough, and the third whatever it likes."""
    clip = {"kind": "quantile", "value": 0.5, "bit_noise": 1e-3, "lr": 1.0}
    noise = {**SEEDED, "multiplier": 1e-4}
    three = stand_ins({**AT_SERVER, "clip": clip, "noise": noise, "rounds": 2}, width=1)
    told = torch.tensor([sent], dtype=torch.float64)
    three.transport.behaviour["west"] = changed(watched=told)
    three.server().serve()
    share = (0.5 + 0.5 + counted) / 3 + 0.5
    moved = 0.5 * torch.exp(torch.tensor(0.5 - share)).item()
    assert float(three.transport.asks[1].moving[0]) == pytest.approx(moved, rel=0.01)


def test_a_flipped_bit_that_is_none_counts_as_zero():
    watched = Quantile(0.5, 0.5, flip=0.2).statistic
    keys = Streams(1).keys("client-bits", 1, [0])
    bit = float(watched.randomise_bits(torch.ones(1, 1, dtype=torch.float64), keys).abs()[0, 0])
    rows = torch.tensor([[bit], [-bit], [bit * 1.001], [0.5], [torch.nan]], dtype=torch.float64)
    assert watched.read(rows, secure=True)[:, 0].tolist() == [bit, -bit, 0.0, 0.0, 0.0]


def test_what_clients_may_send_to_a_clip_stays_as_it_is():
    histogram = Median(0.5, -2, 2, 1, Budget(1.0, 1e-5), noise=0.7).statistic
    for watched, rows in (
        (Quantile(0.5, 0.5, noise=3.0).statistic, torch.tensor([[0.5], [-0.5], [0.0]])),
        (histogram, torch.eye(5)),
    ):
        rows = rows.double()
        assert torch.equal(watched.read(rows, secure=False), rows)
        aligned = watched.cut_to_grid(rows)
        assert torch.equal(watched.read(aligned, secure=True), aligned)


def test_a_late_answer_is_dropped_for_good(stand_ins):
    """It neither counts in its own round nor, handed out again, in the next."""
    three = stand_ins({**FEDAVG, "rounds": 2})

    def slow(transport, ask, reply):
        if ask.round == 1:
            return transports.late(transport, ask, reply)
        return [Arrival("west", transport.sent["west"][0]), Arrival("west", reply)]

    three.transport.behaviour["west"] = slow
    three.server().serve()
    first, second = three.outcomes
    assert first.answered == ["north", "south"]
    assert first.rejected == {"west": "it answered after the deadline"}
    assert second.answered == list(NAMES)
    assert "attempt 0 at round 1" in second.rejected["west"]
