"""A malicious server, over the wire of a federation: a site reveals one sum, and charges for it."""

import os
from dataclasses import replace

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedveil.base.errors import BadInput
from fedveil.flower.masking_keeper import MOST_RUNS, KeeperStep, KeeperTask, MaskingKeeper
from fedveil.flower.messages import MaskedAsk, Refusal, RoundAsk, SumStep, bytes_tensor, new_run_id
from fedveil.flower.sum_terms import sum_terms
from fedveil.masking.sum_messages import (
    Advert,
    Kind,
    MessageRefused,
    Place,
    counted,
    start,
    with_length,
)
from fedveil.masking.sum_server import SumServer
from tests.flower.sites import charges, hashes_of, tail_of
from tests.flower.summing import SUMMED, Summing, kind_of


class Enemy:
    """A server that says what it likes, to sites that think it is theirs."""

    def __init__(self, summing, run=None):
        self.sites = summing.transport.sites
        self.summing, self.run = summing, run or new_run_id()
        site = self.sites["north"]
        self.digest, self.state = site.digest, site.training.start()
        keys = site.sums.site_keys.public_keys
        self.terms = sum_terms(site.sums.secure_sum, keys, self.digest, self.run, site.sums.size)
        self.server = SumServer(self.terms)

    def step(self, name, content=b"", round=1, attempt=0, **changes):
        message = SumStep(self.run, round, attempt, self.digest, name, bytes_tensor(content))
        return self.sites[name].answer(replace(message, **changes))

    def collect(self):
        """The keys of all sites."""
        for name in self.sites:
            self.server.add_advert(self.step(name).encoded)

    def ask(self, roster, round=1, attempt=0, **changes):
        params, moving = self.state.params, self.state.adaptive_state
        place = (self.run, round, attempt, self.digest, params, moving)
        masked = MaskedAsk(*place, bytes_tensor(roster), ledger_tail=tail_of(hashes_of(9)))
        return replace(masked, **changes)

    def masked(self, round=1, attempt=0):
        """The vectors of all sites."""
        roster = self.server.open(Place(round, attempt))
        ask = self.ask(roster, round, attempt)
        return {name: site.answer(ask).encoded for name, site in self.sites.items()}

    def closings(self, messages, names):
        for name in names:
            self.server.add_masked(messages[name])
        return {self.summing.names[site]: each for site, each in self.server.close().items()}


@pytest.fixture
def summing(tmp_path):
    return Summing(tmp_path, SUMMED, 3)


@pytest.fixture
def enemy(summing):
    found = Enemy(summing)
    found.collect()
    return found


def charged(enemy):
    return {name: charges(site) for name, site in enemy.sites.items()}


def refused(reply, words):
    assert isinstance(reply, Refusal)
    assert words in reply.reason
    return True


def test_a_site_of_a_secure_sum_answers_no_ask_without_a_roster(enemy):
    """Its own share of the noise is less than the first claim: without masks it sends nothing."""
    ask = enemy.ask(b"")
    place = (ask.run, ask.round, ask.attempt, ask.plan, ask.params, ask.moving)
    assert refused(enemy.sites["north"].answer(RoundAsk(*place)), "has a secure sum")
    assert charged(enemy) == dict.fromkeys(enemy.sites, 0)


@pytest.mark.parametrize("place", [0, 1])
def test_keys_that_no_owner_knows_are_no_site(enemy, place):
    """A server that put itself in the place of two sites would read the third one's vector."""
    keys = os.urandom(32), Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    pretended = Advert.signed(enemy.terms, place, *keys, ec.generate_private_key(ec.SECP384R1()))
    enemy.server._adverts[place] = pretended
    roster = enemy.server.open(Place(1))
    assert refused(enemy.sites["north"].answer(enemy.ask(roster)), "is not signed by its key")
    assert charged(enemy) == dict.fromkeys(enemy.sites, 0)


def test_keys_of_another_federation_are_no_site(tmp_path, enemy):
    """The same owners, one key changed: terms differ, and so does every message."""
    (tmp_path / "other").mkdir()
    other = Enemy(Summing(tmp_path / "other", SUMMED, 3), enemy.run)
    other.collect()
    roster = other.server.open(Place(1))
    assert refused(enemy.sites["north"].answer(enemy.ask(roster)), "of other terms")
    assert charged(enemy)["north"] == 0


def test_a_roster_below_the_threshold_or_without_the_site_is_refused(summing, enemy):
    enemy.server.forget(0)
    roster = enemy.server.open(Place(1))
    assert refused(enemy.sites["north"].answer(enemy.ask(roster)), "does not have this site's keys")
    enemy.server.add_advert(enemy.step("north").encoded)
    roster = bytearray(enemy.server.open(Place(1)))
    one = enemy.server._adverts[0].message
    alone = bytes(roster[: 5 + 1 + 32 + 12]) + counted([with_length(one)])
    assert refused(enemy.sites["north"].answer(enemy.ask(alone)), "has 1 parts, not 2 to 3")
    assert charged(enemy)["north"] == 0


def test_both_secrets_of_a_site_are_never_revealed(enemy):
    """All three sites first, then the same round as if one of them had dropped out."""
    messages = enemy.masked()
    before = enemy.server._now
    closings = enemy.closings(messages, enemy.sites)
    assert kind_of(enemy.step("north", closings["north"])).name == "REVEAL"
    enemy.server._now = replace(
        before,
        statements={},
        vectors=b"",
        masked_sum=before.masked_sum * 0,
        boxes=dict(before.boxes),
    )
    others = enemy.closings(messages, ("north", "west"))
    assert refused(enemy.step("north", others["north"]), "has answered otherwise")
    again = enemy.step("north", closings["north"])
    assert kind_of(again).name == "REVEAL"


@pytest.mark.parametrize("restart", [False, True])
def test_what_was_begun_is_not_begun_again_after_a_restart(summing, enemy, restart):
    messages = enemy.masked()
    assert charged(enemy) == dict.fromkeys(enemy.sites, 1)
    closings = enemy.closings(messages, enemy.sites)
    if restart:
        summing.restart("north")
    reply = enemy.step("north", closings["north"])
    assert isinstance(reply, Refusal) is restart
    enemy.collect()
    roster = enemy.server.open(Place(1))
    assert refused(enemy.sites["north"].answer(enemy.ask(roster)), "took part in round 1")
    assert charged(enemy)["north"] == 1


def test_two_views_of_a_round_open_nothing(enemy):
    """A certificate takes as many sites as a sum, which agree to the very same vectors."""
    messages = enemy.masked()
    before = enemy.server._now
    agreed = {}
    for name, view in (("north", ("north", "south")), ("west", ("south", "west"))):
        enemy.server._now = replace(before, statements={}, vectors=b"", boxes={})
        closing = enemy.closings(messages, view)[name]
        agreed[name] = enemy.step(name, closing).encoded
    enemy.server._now = replace(before, statements={}, vectors=b"", boxes={})
    enemy.closings(messages, ("north", "south"))
    with pytest.raises(MessageRefused, match="other vectors"):
        enemy.server.add_agreed(agreed["west"])
    enemy.server.add_agreed(agreed["north"])
    with pytest.raises(MessageRefused, match="1 of 3 sites agreed"):
        enemy.server.certify()
    forged = start(Kind.CERTIFICATE, enemy.terms) + Place(1).bytes
    for parts in ([agreed["north"]] * 2, [agreed["north"], agreed["west"]]):
        assert isinstance(enemy.step("north", forged + counted(parts)), Refusal)


def test_messages_of_other_rounds_runs_sites_and_plans_are_refused(summing, enemy):
    messages = enemy.masked()
    closings = enemy.closings(messages, enemy.sites)
    other = Enemy(summing)
    other.collect()
    north = enemy.sites["north"]
    for reply in (
        enemy.step("north", closings["south"]),  # another site's boxes
        other.step("north", closings["north"]),  # another run
        enemy.step("north", messages["south"]),  # no step of a server's
        enemy.step("north", b"closing"),
        enemy.step("north", closings["north"][:-1]),
        enemy.step("north", closings["north"] + b"\0"),
        enemy.step("north", closings["north"], site="south"),
        enemy.step("north", closings["north"], plan="0" * 64),
    ):
        assert isinstance(reply, Refusal)
    roster = enemy.server._now.roster.message
    asks = (
        enemy.ask(roster, round=2),  # the roster of another round, attempt or run
        enemy.ask(roster, attempt=1),
        enemy.ask(roster, run=other.run),
        enemy.ask(roster),  # once more
        enemy.ask(b""),
    )
    for ask in asks:
        assert isinstance(north.answer(ask), Refusal)
    assert charged(enemy) == dict.fromkeys(enemy.sites, 1)
    assert kind_of(enemy.step("north", closings["north"])).name == "REVEAL"


def test_a_thousand_altered_messages_are_refused_and_change_nothing(enemy):
    messages = enemy.masked()
    closings = enemy.closings(messages, enemy.sites)
    whole, draw = closings["north"], os.urandom
    for _ in range(1000):
        place = int.from_bytes(draw(4), "big") % len(whole)
        changed = bytearray(whole)
        changed[place] ^= 1 + draw(1)[0] % 255
        assert isinstance(enemy.step("north", bytes(changed)), Refusal)
    for name, closing in closings.items():
        enemy.server.add_reveal(enemy.step(name, closing).encoded)
    assert len(enemy.server.sum(2**53)) == enemy.terms.words


def test_rounds_go_forward_and_each_attempt_is_charged(enemy):
    for round, attempt in ((1, 0), (1, 1), (3, 0)):
        assert len(enemy.masked(round, attempt)) == 3
    for round, attempt in ((2, 0), (1, 2), (3, 0)):
        roster = enemy.server.open(Place(round, attempt))
        reply = enemy.sites["north"].answer(enemy.ask(roster, round, attempt))
        assert refused(reply, "is not after it")
    assert charged(enemy) == dict.fromkeys(enemy.sites, 3)


def test_an_attempt_that_a_later_one_overtook_is_charged_and_sends_nothing(enemy, monkeypatch):
    """Two processes of a site: the second begins a round while the first one trains."""
    north = enemy.sites["north"]
    first, second = (enemy.server.open(Place(round)) for round in (1, 2))
    report = type(north)._report

    def overtaken(self, ask):
        self.sums.join_round(enemy.ask(second, 2))
        return report(self, ask)

    monkeypatch.setattr(type(north), "_report", overtaken)
    assert refused(north.answer(enemy.ask(first)), "is not the round that was begun last")
    assert charges(north) == 1


@pytest.mark.parametrize("place", [(2, 0), (1, 1)])
def test_a_roster_of_a_later_round_than_the_ask_begins_nothing(enemy, place):
    """Neither is it charged, nor does it keep the site from the rounds before it."""
    later = enemy.server.open(Place(*place))
    reply = enemy.sites["north"].answer(enemy.ask(later))
    assert refused(reply, f"is of round {place[0]}, attempt {place[1]}")
    assert charged(enemy)["north"] == 0
    assert len(enemy.masked()) == 3
    assert charged(enemy) == dict.fromkeys(enemy.sites, 1)


def test_a_site_without_its_keys_process_masks_nothing(enemy):
    north = enemy.sites["north"]
    roster = enemy.server.open(Place(1))
    north.sums = replace(north.sums, keeper=lambda: None)
    assert refused(enemy.step("north"), "no process with masking keys")
    assert refused(north.answer(enemy.ask(roster)), "no process with masking keys")
    assert charges(north) == 0


def test_what_goes_wrong_with_keys_or_journal_is_the_owners_to_know(summing, enemy):
    messages = enemy.masked()
    closings = enemy.closings(messages, enemy.sites)
    north = enemy.sites["north"]

    class Broken:
        def perform(self, task, content):
            raise BadInput(f"the journal {task.journal} cannot be written")

    north.sums = replace(north.sums, keeper=Broken)
    reply = enemy.step("north", closings["north"])
    assert refused(reply, "its owner was told why")
    assert "journal" not in reply.reason


def test_a_report_that_is_off_the_grid_is_not_sent(enemy, monkeypatch):
    north = enemy.sites["north"]
    report = type(north)._report

    def off(self, ask):
        rows, statistic = report(self, ask)
        return rows + 1e-9, statistic

    monkeypatch.setattr(type(north), "_report", off)
    roster = enemy.server.open(Place(1))
    assert refused(north.answer(enemy.ask(roster)), "cannot be used")
    assert charges(north) == 1


def task_of(enemy, step, **changes):
    north = enemy.sites["north"]
    task = KeeperTask(
        step, enemy.terms, 0, north.sums.site_keys.key, str(north.sums.journal), Place(1)
    )
    return replace(task, **changes)


def test_a_keeper_holds_the_keys_of_few_runs(enemy):
    keeper = MaskingKeeper()
    first = keeper.perform(task_of(enemy, KeeperStep.KEYS), b"")
    assert keeper.perform(task_of(enemy, KeeperStep.KEYS), b"") == first
    runs = [replace(enemy.terms, run=os.urandom(32)) for _ in range(MOST_RUNS - 1)]
    for terms in runs:
        keeper.perform(task_of(enemy, KeeperStep.KEYS, terms=terms), b"")
    assert keeper.perform(task_of(enemy, KeeperStep.KEYS), b"") == first
    keeper.perform(task_of(enemy, KeeperStep.KEYS, terms=runs[0]), b"")
    for _ in range(MOST_RUNS - 1):
        keeper.perform(
            task_of(enemy, KeeperStep.KEYS, terms=replace(runs[0], run=os.urandom(32))), b""
        )
    assert keeper.perform(task_of(enemy, KeeperStep.KEYS), b"") != first


def test_terms_are_those_of_plan_run_and_keys(enemy):
    north = enemy.sites["north"].sums
    keys, run, digest = north.site_keys.public_keys, enemy.run, enemy.digest
    same = sum_terms(north.secure_sum, keys, digest, run, north.size)
    assert same.hash == enemy.terms.hash
    others = {
        sum_terms(north.secure_sum, keys[::-1], digest, run, north.size).hash,
        sum_terms(north.secure_sum, keys, "0" * 64, run, north.size).hash,
        sum_terms(north.secure_sum, keys, digest, "0" * 32, north.size).hash,
        sum_terms(north.secure_sum, keys, digest, run, north.size + 1).hash,
        sum_terms(replace(north.secure_sum, threshold=3), keys, digest, run, north.size).hash,
    }
    assert len(others | {same.hash}) == 6


def test_a_step_has_the_bytes_of_masking_and_nothing_else():
    with pytest.raises(BadInput, match="content"):
        SumStep("0" * 32, 1, 0, "0" * 64, "north", torch.zeros(3))
    with pytest.raises(BadInput, match="no name!"):
        SumStep("0" * 32, 1, 0, "0" * 64, "no name!", torch.zeros(3, dtype=torch.uint8))
