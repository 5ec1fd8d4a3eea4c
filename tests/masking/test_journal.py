"""What a site has answered is on disk before it is sent, and binds every later process."""

import sqlite3

import pytest

from fedveil.base.errors import BadInput
from fedveil.masking.journal import PAIRS, SELF, Journal
from fedveil.masking.sum_messages import MessageRefused, Place
from tests.masking.parties import Parties

RUN, VECTORS = bytes(32), b"vectors"
SECRETS = {0: SELF, 1: SELF, 2: PAIRS}


def test_an_attempt_is_begun_once_and_in_order(tmp_path):
    journal = Journal(tmp_path / "journal.db")
    journal.record_begin(RUN, Place(3, 1))
    for place in (Place(3, 1), Place(3, 0), Place(2, 9)):
        for again in (journal, Journal(tmp_path / "journal.db")):
            with pytest.raises(MessageRefused, match="is not after it"):
                again.record_begin(RUN, place)
    journal.record_begin(RUN, Place(3, 2))
    journal.record_begin(RUN, Place(4))
    journal.record_begin(bytes([1] * 32), Place(1))


def test_an_answer_binds_also_after_a_restart(tmp_path):
    path = tmp_path / "journal.db"
    Journal(path).record_answer(RUN, Place(1), SECRETS, VECTORS)
    for again in (Journal(path), Journal(path)):
        again.record_answer(RUN, Place(1), SECRETS, VECTORS)
        for secrets in (
            {**SECRETS, 2: SELF},
            {**SECRETS, 0: PAIRS},
            {0: SELF, 1: SELF},
            {**SECRETS, 3: SELF},
        ):
            with pytest.raises(MessageRefused, match="has answered otherwise"):
                again.record_answer(RUN, Place(1), secrets, VECTORS)
        with pytest.raises(MessageRefused, match="has answered otherwise"):
            again.record_answer(RUN, Place(1), SECRETS, b"other vectors")
    again.record_answer(RUN, Place(1, 1), {**SECRETS, 2: SELF}, VECTORS)
    again.record_answer(bytes([1] * 32), Place(1), {**SECRETS, 2: SELF}, VECTORS)


def test_no_site_can_be_entered_twice(tmp_path):
    path = tmp_path / "journal.db"
    Journal(path).record_answer(RUN, Place(1), SECRETS, VECTORS)
    with sqlite3.connect(path) as db, pytest.raises(sqlite3.IntegrityError):
        db.execute("INSERT INTO answered VALUES (?, 1, 0, 2, 'self', ?)", (RUN, VECTORS))


def test_commits_wait_for_the_disk(tmp_path):
    journal = Journal(tmp_path / "journal.db")
    assert journal._db.execute("PRAGMA synchronous").fetchone() == (3,)
    assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("delete",)


@pytest.mark.parametrize("step", ["record_begin", "record_answer"])
def test_what_cannot_be_written_is_not_done(step, monkeypatch):
    parties = Parties(3, 2)
    messages = parties.masked(parties.vectors())
    for message in messages.values():
        parties.server.add_masked(message)
    closings = parties.server.close()
    site = parties.sites[0]

    def broken(*args):
        raise BadInput("the disk is full")

    monkeypatch.setattr(site._journal, step, broken)
    if step == "record_answer":
        with pytest.raises(BadInput, match="disk is full"):
            site.answer(closings[0])
        assert site._now.counted_sites == []
    else:
        with pytest.raises(BadInput, match="disk is full"):
            site.begin(parties.server.open(Place(2)))
        assert site._now.roster.place == Place(1)


def test_answers_are_on_disk_when_they_are_sent(tmp_path):
    """At the moment of the signature another process reads them."""
    parties = Parties(3, 2)
    path = tmp_path / "journal.db"
    parties.journals[0] = Journal(path)
    parties.sites[0] = parties.restarted(0)
    parties.server.add_advert(parties.sites[0].advert)
    messages = parties.masked(parties.vectors())
    for site in (0, 1):
        parties.server.add_masked(messages[site])
    closings, seen = parties.server.close(), []

    class Signing:
        def sign(self, body):
            with sqlite3.connect(path) as db:
                seen.append(
                    db.execute("SELECT site, secret FROM answered ORDER BY site").fetchall()
                )
            return bytes(64)

    parties.sites[0]._signing = Signing()
    parties.sites[0].answer(closings[0])
    assert seen == [[(0, SELF), (1, SELF), (2, PAIRS)]]


def test_the_same_question_gets_the_same_answer():
    parties = Parties(3, 2)
    messages = parties.masked(parties.vectors())
    for site in (0, 1):
        parties.server.add_masked(messages[site])
    closings = parties.server.close()
    site = parties.sites[0]
    agreed = [site.answer(closings[0]) for _ in range(2)]
    assert agreed[0] == agreed[1]
    for number in (0, 1):
        parties.server.add_agreed(parties.sites[number].answer(closings[number]))
    certificate = parties.server.certify()
    assert site.reveal(certificate) == site.reveal(certificate)


@pytest.mark.parametrize("content", [b"no database" * 100, None])
def test_files_that_are_no_journals_are_refused(tmp_path, content):
    path = tmp_path / "journal.db"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(BadInput, match=r"the journal .*journal\.db cannot be"):
        Journal(path)


def test_a_journal_that_is_deleted_is_a_new_one_and_keys_are_new_as_well():
    """What the file protects then is protected by the keys, which died with the process."""
    parties = Parties(3, 2)
    parties.masked(parties.vectors())
    parties.journals[0] = Journal()
    restarted = parties.restarted(0)
    assert restarted.advert != parties.sites[0].advert
    with pytest.raises(MessageRefused, match="does not have this site's keys"):
        restarted.begin(parties.server._now.roster.message)
