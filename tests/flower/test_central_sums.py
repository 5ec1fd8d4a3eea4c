"""`central` behind a secure sum, over messages: sites flip their coins, the server sees sums."""

from contextlib import suppress

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.flower.federation_server import RemoteEngine
from fedveil.flower.policy import terms_of
from fedveil.flower.site_check import report_lines, site_report
from fedveil.flower.site_sums import SiteSums
from fedveil.masking.sum_messages import Kind
from fedveil.privacy.accounting.claims import Trust
from fedveil.privacy.ledger.file import read_charges
from fedveil.privacy.noise import mechanisms
from fedveil.privacy.releases.secure_sum import SecureSum, report_grid
from fedveil.privacy.sampling import OwnCoins
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from tests.flower.sites import CENTRAL, LOCAL, charges
from tests.flower.summing import Summing, kind_of
from tests.flower.test_secure_sums import at, nothing
from tests.flower.transports import Killed

POLICY = {
    "epsilon": {"client": 1000.0},
    "delta": 1e-3,
    "trust": ["local", "secure-sum"],
    "repeats": 4,
}
SUMMED = {
    **CENTRAL,
    "rounds": 3,
    "sum": {"kind": "secure"},
    "clip": {"kind": "quantile", "value": 0.5, "bit_noise": 2.0},
    "noise": {**CENTRAL["noise"], "multiplier": 2.0},
    "budget": {"epsilon": 100.0, "delta": 1e-5},
}


class Clients(Summing):
    """Sites whose owners trust a secure sum with their clients."""

    def open(self, name, policy=None, **keys):
        return super().open(name, POLICY if policy is None else policy, **keys)


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
        seen[round.number] = torch.cat([found.total, found.statistic_values])
        return found

    monkeypatch.setattr(SiteSums, "masked_report", masking)
    monkeypatch.setattr(RemoteEngine, "_masked_sum", summing)
    return seen


def summed(reports, round, names):
    return sum(reports[round, name] for name in names)


def test_a_run_is_the_sum_of_all_sites_reports_and_moves_the_clip(tmp_path, reports):
    three = Clients(tmp_path, SUMMED, 3)
    server = three.server()
    clips = [0.5]
    result = server.serve(lambda line: clips.append(line["clip"]))
    assert (result["rounds"], result["stopped"]) == (3, "rounds")
    for round in (1, 2, 3):
        report = reports[round, "north"]
        assert len(report) == 15 + 1
        assert torch.equal(reports[round], summed(reports, round, three.names))
    assert [outcome.answered for outcome in three.outcomes] == [[*three.names]] * 3
    schedule = server.run.training.plan.clip_schedule
    expected = [0.5]
    for round in (1, 2):
        bits = reports[round][15:]
        expected.append(schedule.next_value(expected[-1], bits, 0.5 * 3, round))
    assert clips[1:] == pytest.approx(expected)
    assert [claim["trust"] for claim in result["claims"]][:1] == ["secure-sum"]
    assert "site" in [claim["trust"] for claim in result["claims"]]
    for name in three.names:  # whatever its coins said
        assert charges(three.transport.sites[name]) == 3
    assert list(tmp_path.rglob("answer.safetensors")) == []


def test_every_site_is_asked_and_flips_a_coin_of_its_own(tmp_path, monkeypatch, reports):
    """A site whose coin says no works all the same, and sends noise alone, silenced here."""
    drawn, worked = [], []
    from fedveil.training.work import ClientSgd

    updates = ClientSgd.updates

    def coins(self, ids, round, streams):
        assert streams.secure
        assert len(ids) == 1
        drawn.append((round, int(ids[0])))
        return np.array([ids[0] == 1])

    def working(self, clients):
        worked.append(int(clients.cohort.ids[0]))
        return updates(self, clients)

    monkeypatch.setattr(OwnCoins, "coins", coins)
    monkeypatch.setattr(ClientSgd, "updates", working)
    monkeypatch.setattr(
        mechanisms, "gaussian_int", lambda source, scale, shape: np.zeros(shape, dtype=np.int64)
    )
    three = Clients(tmp_path, {**SUMMED, "rounds": 2}, 3)
    three.server().serve()
    assert sorted(drawn) == [(round, site) for round in (1, 2) for site in range(3)]
    assert sorted(worked) == [0, 0, 1, 1, 2, 2]
    for round in (1, 2):
        sent = [bool(reports[round, name].any()) for name in three.names]
        assert sent == [False, True, False]


def test_no_message_of_a_site_has_its_report(tmp_path, reports):
    three = Clients(tmp_path, {**SUMMED, "rounds": 1}, 3)
    three.server().serve()
    for name, sent in three.transport.sent.items():
        site = three.transport.sites[name]
        clip = site.plan.clip(site.training.start().adaptive_state, 1)
        plain = report_grid(site.plan, clip, 15).quantise(reports[1, name]).numpy()
        assert len(plain) == 16
        assert not any(hasattr(message, "watched") for message in sent)
        (masked,) = [message for message in sent if kind_of(message) is Kind.MASKED]
        words = np.frombuffer(masked.encoded[-8 * len(plain) :], dtype="<i8")
        assert not (words == plain).any()


def test_sites_that_drop_out_cost_no_round_down_to_the_threshold(tmp_path, reports):
    five = Clients(tmp_path, {**SUMMED, "sum": {"kind": "secure", "threshold": 3}}, 5)
    five.transport.behaviour = dict.fromkeys(("east", "centre"), at(Kind.MASKED, nothing))
    five.server(minimum=3).serve()
    for round, outcome in enumerate(five.outcomes, 1):
        assert outcome.enough
        assert torch.equal(reports[round], summed(reports, round, outcome.answered))
    assert five.outcomes[0].answered == ["north", "south", "west"]


def test_below_the_threshold_model_and_clip_stay_and_the_charge_too(tmp_path):
    five = Clients(tmp_path, {**SUMMED, "rounds": 1}, 5)
    five.transport.behaviour = dict.fromkeys(five.names[:3], at(Kind.MASKED, nothing))
    server = five.server()
    before = server.run.training.start()
    server.serve()
    (outcome,) = five.outcomes
    assert "a sum needs 3" in outcome.lost
    assert torch.equal(server.run.training.task.parameters, before.params)
    assert len(read_charges(tmp_path / "run" / "ledger.db")) == 1


def test_only_the_cohort_that_was_drawn_is_asked_and_masks(tmp_path, reports):
    recipe = {**SUMMED, "sample": {"kind": "round-robin", "size": 3}, "rounds": 3}
    four = Clients(tmp_path, {**recipe, "sum": {"kind": "secure", "threshold": 3}}, 4)
    four.server(minimum=3).serve()
    for round, outcome in enumerate(four.outcomes, 1):
        assert len(outcome.invited) == 3
        assert sorted(outcome.answered) == sorted(outcome.invited)
        assert torch.equal(reports[round], summed(reports, round, outcome.answered))
        masked = {key[1] for key in reports if isinstance(key, tuple) and key[0] == round}
        assert masked == {*outcome.invited}
    # nobody of a roster was missing, so that no seed of a mask was opened
    kinds = {kind_of(message) for sent in four.transport.sent.values() for message in sent}
    assert Kind.REVEAL in kinds
    assert Kind.AGREED not in kinds
    assert sum(charges(site) for site in four.transport.sites.values()) == 9


@pytest.mark.parametrize("end", [KeyboardInterrupt, Killed])
def test_a_server_that_was_stopped_begins_another_attempt_with_new_coins(
    tmp_path, end, monkeypatch
):
    flips = []
    coins = OwnCoins.coins

    def noted(self, ids, round, streams):
        flips.append((round, int(ids[0])))
        return coins(self, ids, round, streams)

    monkeypatch.setattr(OwnCoins, "coins", noted)
    three = Clients(tmp_path, SUMMED, 3)
    three.transport.stop, three.transport.end = (2, "south"), end
    with suppress(Killed):
        three.server().serve()
    three.transport.stop = None
    result = three.server().serve()
    assert result["rounds"] == 3
    charged = [(c.round, c.attempt) for c in read_charges(tmp_path / "run" / "ledger.db")]
    assert charged == [(1, 0), (2, 0), (2, 1), (3, 0)]
    assert charges(three.transport.sites["north"]) == 4
    assert flips.count((2, 0)) == 2


def test_a_site_that_fails_at_its_work_sends_its_noise(tmp_path, reports, monkeypatch):
    from fedveil.training.work import ClientSgd

    updates = ClientSgd.updates

    def failing(self, clients):
        if clients.cohort.ids[0] == 0:
            raise RuntimeError("no memory")
        return updates(self, clients)

    monkeypatch.setattr(ClientSgd, "updates", failing)
    three = Clients(tmp_path, {**SUMMED, "rounds": 1}, 3)
    three.server().serve()
    assert three.outcomes[0].answered == [*three.names]
    assert reports[1, "north"].any()


def test_an_owner_sees_both_claims_and_what_leaves(tmp_path):
    three = Clients(tmp_path, SUMMED, 3)
    site = three.transport.sites["north"]
    report = site_report(site)
    (first,), (alone,) = report["cost"], report["alone"]
    assert (first["trust"], alone["trust"]) == ("secure-sum", "site")
    assert first["epsilon"] < alone["epsilon"]
    assert {line.trust for line in site.terms.lines} == {Trust.SECURE_SUM, Trust.SITE}
    text = "\n".join(report_lines(site, report))
    assert "randomised here and masked before it leaves" in text
    assert "a coin of this site decides" in text
    assert "bits in the same masked report, with noise" in text
    assert "WITHOUT" not in text
    assert "if all other sites side with the server" in text
    other = three.open("south", {**POLICY, "trust": ["local"]})
    assert any("trust" in str(objection) for objection in other.objections())


def test_a_site_sends_no_bit_with_a_share_of_noise_that_is_not_masked(tmp_path):
    """Under local DP a clip's sum is simulated: a server would see every single bit."""
    recipe = {**LOCAL, "sum": {"kind": "secure"}}
    recipe["clip"] = {"kind": "quantile", "value": 0.5, "bit_noise": 20.0}
    recipe["noise"] = {**LOCAL["noise"], "multiplier": 2.0}
    recipe["budget"] = {"epsilon": 100.0, "delta": 1e-5}
    with pytest.raises(BadInput, match="is for simulations"):
        Clients(tmp_path, recipe, 3)
    plan = build(load_recipe({**recipe, "data": {"name": "digits", "clients": 3}})).plan
    assert plan.release.statistic_channel == SecureSum(3, 2, 3)
    with pytest.raises(BadInput, match="beside reports that are not masked"):
        terms_of(plan, 0, 0)


def test_seeded_noise_is_no_vector_of_integers(tmp_path):
    recipe = {**SUMMED, "noise": {**SUMMED["noise"], "source": "seeded"}}
    with pytest.raises(BadInput, match="masks are for integers"):
        Clients(tmp_path, recipe, 3)
