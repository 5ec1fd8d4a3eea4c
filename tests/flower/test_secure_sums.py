"""Secure sums between a server and its sites: sums are exact, whoever drops out, and charged."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.flower.federation_files import Federation, RegisteredSite
from fedveil.flower.federation_server import RemoteEngine
from fedveil.flower.messages import Arrival, MaskedAsk, Refusal, SumStep, bytes_tensor
from fedveil.flower.policy import accepted
from fedveil.flower.site_check import report_lines, site_report
from fedveil.flower.site_sums import SiteSums
from fedveil.masking.sum_messages import STATEMENT, Kind, vector_size
from fedveil.privacy.accounting.claims import Trust
from fedveil.privacy.ledger.file import read_charges
from fedveil.privacy.releases.secure_sum import report_grid
from tests.flower.conftest import Trio
from tests.flower.sites import LOCAL, charges, open_site
from tests.flower.summing import POLICY, RECORDS, SUMMED, Summing, kind_of
from tests.flower.transports import Killed, late, refuses, replays, twice, unreadable

ONE = {**SUMMED, "rounds": 1}
FIVE = {**ONE, "sum": {"kind": "secure", "threshold": 3}}


@pytest.fixture
def reports(monkeypatch):
    """What sites masked, by round and site, and the sums that the server made of it."""
    seen = {}
    mask, total = SiteSums.masked_report, RemoteEngine._masked_sum

    def masking(self, ask, report, clip):
        seen[ask.round, self.name] = report.clone()
        return mask(self, ask, report, clip)

    def summing(self, sums, round, ask, outcome):
        found = total(self, sums, round, ask, outcome)
        seen[round.number] = found.total.clone()
        return found

    monkeypatch.setattr(SiteSums, "masked_report", masking)
    monkeypatch.setattr(RemoteEngine, "_masked_sum", summing)
    return seen


def at(kind, does):
    """A behaviour of a site at one kind of step, from when it is first reached."""

    def behave(transport, ask, reply):
        return (does if kind_of(reply) is kind else passed_on)(transport, ask, reply)

    return behave


def passed_on(transport, ask, reply):
    return [Arrival(reply.site, reply)]


def nothing(transport, ask, reply):
    return []


def summed(reports, round, names):
    """The sum of what these sites masked: exact, since reports are on one grid."""
    return sum(reports[round, name] for name in names)


def test_a_run_is_the_sum_of_reports_to_the_last_bit(tmp_path, reports):
    three = Summing(tmp_path, SUMMED, 3)
    result = three.server().serve()
    assert (result["rounds"], result["stopped"]) == (4, "rounds")
    for round in range(1, 5):
        assert torch.equal(reports[round], summed(reports, round, three.names))
    assert [outcome.answered for outcome in three.outcomes] == [[*three.names]] * 4
    trusts = [claim["trust"] for claim in result["claims"]]
    assert trusts[0] == "secure-sum"
    assert "site" in trusts
    for name in three.names:
        assert charges(three.transport.sites[name]) == 4
    kept = list(tmp_path.rglob("answer.safetensors"))
    assert kept == []  # nothing that was not masked is on disk


@pytest.mark.parametrize("missing", [(), ("south",)])
def test_sums_of_few_bits_go_through_the_same_messages(tmp_path, reports, missing):
    """The server has the sum modulo 2^20 to the last bit, and decodes it once."""
    three = Summing(tmp_path, {**ONE, "sum": {"kind": "secure", "bits": 20}}, 3)
    for name in missing:
        three.transport.behaviour[name] = at(Kind.MASKED, nothing)
    result = three.server().serve()
    site = three.transport.sites["north"]
    grid, start = site.plan.release.rotated, three.server("fresh").run.training.start().params
    assert grid.bits == 20
    names = [name for name in three.names if name not in missing]
    steps = sum(grid.report_grid.quantise(reports[1, name]).numpy() for name in names)
    assert np.array_equal(grid.report_grid.quantise(reports[1]).numpy(), grid.centred(steps))
    for name in names:
        (masked,) = [m for m in three.transport.sent[name] if kind_of(m) is Kind.MASKED]
        boxes = (32 * len(three.names) + 16) * (len(three.names) - 1)
        assert len(masked.encoded) == STATEMENT + boxes + vector_size(grid.size, 20)
    expected = torch.from_numpy(steps * grid.spacing)
    grid.open_(expected, 1)
    rate, records = site.plan.noisy_steps.rate, RECORDS * 3
    model = start + (expected / (rate * records)).float()
    assert torch.allclose(Trio.model(three, "run"), model, atol=1e-6)
    claims = result["claims"]
    assert {claim["accountant"] for claim in claims} == {"rdp"}


def test_a_sum_that_is_spread_over_the_whole_range_is_lost(tmp_path, monkeypatch):
    three = Summing(tmp_path, {**ONE, "sum": {"kind": "secure", "bits": 20}}, 3)
    mask = SiteSums.masked_report

    def wrong(self, ask, report, clip):
        draw = np.random.default_rng(self.number).integers(-(2**19), 2**19, len(report))
        grid = self.secure_sum.rotated.report_grid
        return mask(self, ask, grid.dequantise(torch.from_numpy(draw)), clip)

    monkeypatch.setattr(SiteSums, "masked_report", wrong)
    three.server().serve()
    (outcome,) = three.outcomes
    assert not outcome.enough
    assert "spread over all of 2^20 steps" in outcome.lost


def test_no_message_of_a_site_has_its_report(tmp_path, reports):
    """One word of a masked vector is the report's with probability 2^-64."""
    three = Summing(tmp_path, ONE, 3)
    three.server().serve()
    for name, sent in three.transport.sent.items():
        site = three.transport.sites[name]
        grid = report_grid(site.plan, site.plan.clip(site.training.start().adaptive_state, 1), 15)
        plain = grid.quantise(reports[1, name]).numpy()
        assert not any(hasattr(message, "report") for message in sent)
        (masked,) = [message for message in sent if kind_of(message) is Kind.MASKED]
        words = np.frombuffer(masked.encoded[-8 * len(plain) :], dtype="<i8")
        assert not (words == plain).any()
        assert (np.abs(words.astype(float)) > 2.0**53).mean() > 0.5


STEPS = (Kind.ADVERT, Kind.MASKED, Kind.AGREED, Kind.REVEAL)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("does", [nothing, unreadable, late, refuses])
def test_sites_that_drop_out_at_any_step_cost_no_round(tmp_path, reports, kind, does):
    five = Summing(tmp_path, FIVE, 5)
    five.transport.behaviour = dict.fromkeys(("east", "centre"), at(kind, does))
    if kind is Kind.AGREED:  # it takes somebody who is missing to get there
        five.transport.behaviour["east"] = at(Kind.MASKED, nothing)
    assert five.server(minimum=3).serve()["rounds"] == 1
    (outcome,) = five.outcomes
    assert outcome.enough
    gone = {Kind.ADVERT: 2, Kind.MASKED: 2, Kind.AGREED: 1}.get(kind, 0)
    expected = [name for name in five.names if name not in ("east", "centre")[:gone]]
    assert outcome.answered == expected
    assert torch.equal(reports[1], summed(reports, 1, expected))
    assert len(read_charges(tmp_path / "run" / "ledger.db")) == 1


@pytest.mark.parametrize("kind", STEPS)
def test_below_the_threshold_there_is_no_sum_and_the_charge_stays(tmp_path, kind):
    five = Summing(tmp_path, FIVE, 5)
    before = five.server("fresh").run.training.start().params
    five.transport.behaviour = dict.fromkeys(five.names[:3], at(kind, nothing))
    if kind is Kind.AGREED:
        five.transport.behaviour["near"] = five.transport.behaviour.pop("north")
        five.transport.behaviour["north"] = at(Kind.MASKED, nothing)
        five.transport.behaviour["east"] = at(kind, nothing)
    five.server().serve()
    (outcome,) = five.outcomes
    assert not outcome.enough
    assert "a sum needs 3" in outcome.lost
    assert "the model and the charge stay" in str(outcome)
    assert five.lines()[0]["lost"] == outcome.lost
    model = Trio.model(five, "run")
    assert torch.equal(model, before)
    assert len(read_charges(tmp_path / "run" / "ledger.db")) == 1


def test_a_site_that_starts_again_takes_part_from_the_next_round(tmp_path, reports):
    """It has lost its keys: the roster with the old ones is refused, before it is charged."""
    three = Summing(tmp_path, {**SUMMED, "rounds": 3}, 3)

    def again(line):
        if line["round"] == 1:
            three.restart("south")

    three.server().serve(again)
    assert [outcome.answered for outcome in three.outcomes] == [
        ["north", "south", "west"],
        ["north", "west"],
        ["north", "south", "west"],
    ]
    assert "does not have this site's keys" in three.outcomes[1].declined["south"]
    assert charges(three.transport.sites["south"]) == 2
    for round, outcome in enumerate(three.outcomes, 1):
        assert torch.equal(reports[round], summed(reports, round, outcome.answered))


@pytest.mark.parametrize("kind", [Kind.MASKED, Kind.REVEAL])
def test_a_site_that_is_killed_in_a_round_is_recovered(tmp_path, reports, kind):
    """After its vector it counts; before it does not. Either way the round has its sum."""
    three = Summing(tmp_path, {**SUMMED, "rounds": 2}, 3)

    def die(transport, ask, reply):
        if ask.round == 1:
            three.restart("north")
            return [Arrival("north", reply)] if kind is Kind.REVEAL else []
        return [Arrival("north", reply)]

    three.transport.behaviour["north"] = at(Kind.MASKED, die)
    three.server().serve()
    first, second = three.outcomes
    assert ("north" in first.answered) is (kind is Kind.REVEAL)
    assert first.enough
    assert second.enough
    assert {"south", "west"} <= {*second.answered}
    for round, outcome in ((1, first), (2, second)):
        assert torch.equal(reports[round], summed(reports, round, outcome.answered))


def test_a_site_that_is_away_is_left_out_and_asked_for_its_keys_when_it_is_back(tmp_path):
    three = Summing(tmp_path, {**SUMMED, "rounds": 3}, 3)

    def leave(line):
        three.transport.away = {"west"} if line["round"] == 1 else set()

    three.server().serve(leave)
    assert [("west" in outcome.answered) for outcome in three.outcomes] == [True, False, True]
    assert charges(three.transport.sites["west"]) == 2


@pytest.mark.parametrize("does", [twice, replays])
def test_an_answer_counts_once(tmp_path, reports, does):
    three = Summing(tmp_path, {**SUMMED, "rounds": 2}, 3)
    three.transport.behaviour["south"] = does
    three.server().serve()
    for round, outcome in enumerate(three.outcomes, 1):
        assert torch.equal(reports[round], summed(reports, round, outcome.answered))
        assert "south" in {**outcome.rejected, **outcome.declined}


def altered(change):
    def behave(transport, ask, reply):
        content = bytearray(reply.encoded)
        change(content)
        return [Arrival(reply.site, replace(reply, content=bytes_tensor(bytes(content))))]

    return at(Kind.MASKED, behave)


def flip(content):
    content[-1] ^= 1


def cut(content):
    del content[-8:]


def shared(content):
    content[250] ^= 1


@pytest.mark.parametrize("change", [flip, cut, shared, bytearray.clear])
def test_a_vector_that_was_changed_on_the_way_is_named_and_not_summed(tmp_path, reports, change):
    three = Summing(tmp_path, ONE, 3)
    three.transport.behaviour["south"] = altered(change)
    three.server().serve()
    (outcome,) = three.outcomes
    assert outcome.answered == ["north", "west"]
    assert "south" in outcome.rejected
    assert torch.equal(reports[1], summed(reports, 1, outcome.answered))


def test_a_site_that_masks_anything_loses_the_round_and_no_more(tmp_path, monkeypatch):
    three = Summing(tmp_path, ONE, 3)
    sums = three.transport.sites["south"].sums
    perform = sums._perform

    def lying(kind, about, content):
        if kind == "mask":
            content = np.full(len(content) // 8, 2**60, dtype="<i8").tobytes()
        return perform(kind, about, content)

    object.__setattr__(sums, "_perform", lying)
    three.server().serve()
    assert "a site did not follow the protocol" in three.outcomes[0].lost
    assert not three.outcomes[0].enough


@pytest.mark.parametrize("end", [KeyboardInterrupt, Killed])
def test_a_server_that_was_stopped_begins_another_attempt(tmp_path, end):
    """Sites mask once per attempt, so that a round that was cut off is charged again."""
    three = Summing(tmp_path, {**SUMMED, "rounds": 3}, 3)
    three.transport.stop, three.transport.end = (2, "south"), end
    with suppress(Killed):
        three.server().serve()
    three.transport.stop = None
    result = three.server().serve()
    assert result["rounds"] == 3
    charged = [(c.round, c.attempt) for c in read_charges(tmp_path / "run" / "ledger.db")]
    assert charged == [(1, 0), (2, 0), (2, 1), (3, 0)]
    assert charges(three.transport.sites["north"]) == 4
    assert [outcome.answered for outcome in three.outcomes] == [[*three.names]] * 3


def test_seeds_and_runs_are_of_this_federation_alone(tmp_path):
    """Two runs of the same sites: every site has keys for both, and neither takes the other's."""
    three = Summing(tmp_path, ONE, 3)
    three.server("one").serve()
    first = {name: list(sent) for name, sent in three.transport.sent.items()}
    three.transport.sent.clear()
    three.server("two").serve()
    for name in three.names:
        (one,) = [m for m in first[name] if kind_of(m) is Kind.ADVERT]
        (two,) = [m for m in three.transport.sent[name] if kind_of(m) is Kind.ADVERT]
        assert one.encoded != two.encoded
    assert [outcome.enough for outcome in three.outcomes] == [True, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sum_keys": None}, r"site.toml no \[sum_keys\]"),
        ({"number": None, "sizes": None}, r"site.toml no \[sum_keys\]"),
        (
            {"sum_keys": {"key": "node", "public_keys": []}},
            "public_keys are 0 and the plan has 3 sites",
        ),
    ],
)
def test_a_site_without_all_keys_does_not_start(tmp_path, changes, message):
    three = Summing(tmp_path, ONE, 3)
    with pytest.raises(BadInput, match=message):
        three.open("north", **changes)


def test_keys_are_for_recipes_with_a_secure_sum(tmp_path):
    with pytest.raises(BadInput, match=r"for recipes with \[sum\]"):
        open_site(tmp_path, LOCAL, sum_keys={"key": "node", "public_keys": ["x"]})


def test_seeded_noise_is_no_vector_of_integers(tmp_path):
    recipe = {**ONE, "noise": {**SUMMED["noise"], "source": "seeded"}}
    with pytest.raises(BadInput, match="masks are for integers"):
        Summing(tmp_path, recipe, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minimum": 1}, "minimum is 1 and sum.threshold 2"),
        ({"keys": "SHA256:" + "A" * 43}, "a fingerprint, and a secure sum compares signatures"),
    ],
)
def test_a_server_that_cannot_sum_does_not_start(tmp_path, changes, message):
    three = Summing(tmp_path, ONE, 3)
    plan = three.server().run.training.plan
    sites = [
        RegisteredSite(name=name, key=changes.get("keys", f"ecdsa {name}")) for name in three.names
    ]
    with pytest.raises(BadInput, match=message):
        Federation(sites=sites, minimum=changes.get("minimum", 2)).check_plan(plan)


def test_an_owner_sees_both_claims_and_trusts_the_other_sites_by_choice(tmp_path):
    three = Summing(tmp_path, SUMMED, 3)
    site = three.transport.sites["north"]
    report = site_report(site)
    (cost,), (alone,) = report["cost"], report["alone"]
    assert (cost["trust"], alone["trust"]) == ("secure-sum", "site")
    line = next(line for line in site.plan.lines if line.trust is Trust.SITE)
    assert alone["epsilon"] == line.claims(site.terms.permitted_turns)[0].epsilon
    assert alone["epsilon"] > 1.3 * cost["epsilon"]
    text = "\n".join(report_lines(site, report))
    assert "if all other sites side with the server: at most epsilon" in text
    assert "assumed to be honest" in text
    distrustful = three.open("north", {**POLICY, "trust": ["local"]})
    (objection,) = distrustful.objections()
    assert "needs secure-sum trust" in str(objection)
    reply = distrustful.answer(SumStep("0" * 32, 1, 0, site.digest, "north", torch.zeros(0).byte()))
    assert isinstance(reply, Refusal)
    assert "secure-sum" in accepted(distrustful.policy, site.terms, site.plan).trust


def test_a_plain_site_takes_no_part_in_a_secure_sum(tmp_path):
    site = open_site(tmp_path, LOCAL)
    start = site.training.start()
    place = ("0" * 32, 1, 0, site.digest)
    roster = torch.ones(8, dtype=torch.uint8)
    masked = MaskedAsk(*place, start.params, start.adaptive_state, roster)
    reply = site.answer(masked)
    assert isinstance(reply, Refusal)
    assert "has no secure sum" in reply.reason
    assert isinstance(site.answer(SumStep(*place, site.name, roster)), Refusal)
    assert charges(site) == 0
