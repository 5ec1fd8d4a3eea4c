"""Who counts: one report per member and round, whatever they try, and across restarts."""

import asyncio
import os
from dataclasses import replace

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.cli.deploy import mixer
from fedveil.mixing.mixer import MixerConfig, OpenedRounds
from fedveil.mixing.protocol import COLLECTOR, Status, client_tls
from tests.mixing.certificates import Authority
from tests.mixing.loopback import EVERY, HOST, frame, hello, status_of, with_mixer
from tests.mixing.members import HIGH, Federation


@pytest.fixture
def sites(tmp_path):
    return Federation(tmp_path)


def test_each_member_is_counted_once_and_the_collector_collects(sites):
    async def scenario(port, task):
        await sites.send(port, "north")
        await sites.send(port, "south", ~HIGH)
        assert await status_of(sites.collect(port)) is Status.OPEN
        await sites.send(port, "east")
        found = await sites.collect(port)
        assert found.high_counts.tolist() == np.where(HIGH, 2, 1).tolist()
        assert set(found.report_counts) == {3}
        await sites.send(port, "north", round=2)  # rounds are counted apart

    with_mixer(sites.config(), scenario)


def test_a_second_report_is_refused_and_changes_nothing(sites):
    async def scenario(port, task):
        await sites.send(port, "north")
        for _ in range(3):  # with a new certificate in the same name each time
            assert await status_of(sites.send(port, "north", ~HIGH)) is Status.REPEATED
        assert await status_of(sites.collect(port)) is Status.OPEN
        await sites.send(port, "south")
        await sites.send(port, "east")
        found = await sites.collect(port)
        assert found.high_counts.tolist() == (3 * HIGH).tolist()
        assert set(found.report_counts) == {3}

    with_mixer(sites.config(), scenario)


def test_two_reports_of_a_member_at_the_same_time_count_once(sites):
    """Both are admitted before either is complete."""

    async def scenario(port, task):
        pairs = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection(HOST, port, ssl=sites.tls("north"))
            writer.write(hello() + frame(*EVERY[:5]))
            assert await reader.readexactly(1) == bytes([Status.OK])
            pairs.append((reader, writer))
        answers = []
        for reader, writer in pairs:
            writer.write(frame(EVERY[5]))
            answers.append(await reader.read())
            writer.close()
        assert answers == [bytes([Status.OK]), bytes([Status.REPEATED])]
        await sites.send(port, "south")
        assert await status_of(sites.collect(port)) is Status.OPEN
        await sites.send(port, "east")
        assert (await sites.collect(port)).report_counts[0] == 3

    with_mixer(sites.config(), scenario)


def test_a_report_that_broke_off_may_be_sent_again(sites):
    async def scenario(port, task):
        _, writer = await asyncio.open_connection(HOST, port, ssl=sites.tls("north"))
        writer.write(hello() + frame(*EVERY[:5]))
        writer.close()
        for name in sites.names:
            await sites.send(port, name)
        assert (await sites.collect(port)).high_counts.tolist() == (3 * HIGH).tolist()

    with_mixer(sites.config(), scenario)


def test_strangers_and_the_collector_do_not_report_and_members_do_not_collect(sites, tmp_path):
    other = Authority(tmp_path / "other", "other")

    async def scenario(port, task):
        for stranger in ("west", COLLECTOR):  # signed by the authority, and no members
            assert await status_of(sites.send(port, stranger)) is Status.FORBIDDEN
        for context in (
            client_tls(sites.authority.file),
            client_tls(sites.authority.file, *other.sign("north")),
        ):
            assert await status_of(sites.send(port, "", tls=context)) is Status.LOST
            assert await status_of(sites.collect(port, tls=context)) is Status.LOST
        for name in sites.names:
            await sites.send(port, name)
        for name in ("north", "west"):
            assert await status_of(sites.collect(port, name=name)) is Status.FORBIDDEN
        assert (await sites.collect(port)).report_counts[0] == 3

    with_mixer(sites.config(), scenario)


def test_below_the_minimum_of_members_nothing_is_handed_on(sites):
    async def scenario(port, task):
        await sites.send(port, "north")
        for _ in range(3):
            assert await status_of(sites.send(port, "north")) is Status.REPEATED
        await asyncio.sleep(1.0)
        assert await status_of(sites.collect(port)) is Status.TOO_FEW

    with_mixer(sites.config(deadline=0.5), scenario)


def test_a_mixer_that_hands_on_fewer_than_a_claim_relies_on_gets_no_report(sites):
    async def scenario(port, task):
        assert await status_of(sites.send(port, "north", minimum=3)) is Status.UNKNOWN
        assert await status_of(sites.collect(port, minimum=3)) is Status.UNKNOWN
        await sites.send(port, "north", minimum=2)

    with_mixer(sites.config(minimum=2), scenario)


def test_after_a_restart_no_round_opens_again(sites):
    """Otherwise somebody who was counted before would be counted twice in the same round."""

    async def before(port, task):
        for name in ("north", "south"):
            await sites.send(port, name)
        for name in sites.names:
            await sites.send(port, name, round=2)
        assert (await sites.collect(port, 2)).report_counts[0] == 3

    async def after(port, task):
        for round in (1, 2):
            for name in sites.names:
                assert await status_of(sites.send(port, name, round=round)) is Status.FINISHED
            assert await status_of(sites.collect(port, round)) is Status.FORGOTTEN
        for name in sites.names:
            await sites.send(port, name, round=3)
        assert (await sites.collect(port, 3)).report_counts[0] == 3
        await asyncio.wait_for(task, 60)  # the outcome of every round is known

    with_mixer(sites.config(), before)
    with_mixer(sites.config(), after)


def test_a_round_that_cannot_be_noted_does_not_open(sites, monkeypatch):
    def full(self, number):
        raise OSError("no space left")

    async def scenario(port, task):
        monkeypatch.setattr(OpenedRounds, "add", full)
        assert await status_of(sites.send(port, "north")) is Status.LOST
        monkeypatch.undo()
        for name in sites.names:
            await sites.send(port, name)
        assert (await sites.collect(port)).report_counts[0] == 3

    with_mixer(sites.config(), scenario)


def test_what_was_opened_is_on_the_disk_and_has_one_user(tmp_path):
    path = tmp_path / "opened.txt"
    first = OpenedRounds(path)
    first.add(7)
    first.add(12)
    assert path.read_text().split() == ["7", "12"]
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(BadInput, match="another mixer uses it"):
        OpenedRounds(path)
    first.close()
    path.write_text("7\n1")  # cut short
    again = OpenedRounds(path)
    assert again.numbers == {1, 7}
    again.add(3)
    again.close()
    assert path.read_text().split() == ["7", "1", "3"]
    path.write_text("7\nseven\n")
    with pytest.raises(BadInput, match="whole numbers are needed"):
        OpenedRounds(path)
    with pytest.raises(BadInput, match="No such file"):
        OpenedRounds(tmp_path / "missing" / "opened.txt")


def test_a_number_is_flushed_before_the_first_report_is_taken(tmp_path, monkeypatch):
    seen = []
    path = tmp_path / "opened.txt"
    opened = OpenedRounds(path)
    monkeypatch.setattr("os.fsync", lambda file: seen.append(path.read_text()))
    opened.add(5)
    assert [text.split() for text in seen] == [["5"]]
    monkeypatch.setattr("os.write", lambda file, line: len(line) - 1)
    with pytest.raises(OSError, match="round 6"):
        opened.add(6)
    assert 6 not in opened.numbers
    opened.close()


def test_a_number_that_was_cut_short_joins_no_later_one(tmp_path, monkeypatch):
    path, write = tmp_path / "opened.txt", os.write
    opened = OpenedRounds(path)
    with monkeypatch.context() as patch:
        patch.setattr("os.write", lambda file, line: write(file, line[:3]))  # the disk is full
        with pytest.raises(OSError, match="round 127"):
            opened.add(127)
    opened.add(124)
    opened.close()
    again = OpenedRounds(path)
    assert again.numbers == {12, 124}
    again.close()


@pytest.mark.parametrize("missing", ["certificate", "clients_ca", "members", "opened"])
def test_without_a_way_to_tell_clients_apart_a_mixer_is_a_simulation(sites, missing):
    without = {missing: () if missing == "members" else None}
    if missing == "certificate":
        without["key"] = None
    with pytest.raises(BadInput, match=f"mixer.{missing} is missing.*mixer.simulated"):
        sites.config(**without)
    with pytest.raises(BadInput, match=r"mixer\.certificate is missing"):
        MixerConfig(positions=1, minimum=1, expected=1)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (("north", "north", "south"), "a name of its own each"),
        (("north", "", "south"), "a name of its own each"),
        (("north", "south", COLLECTOR), "who collects"),
        (("north", "south"), "mixer.expected is 3 and mixer.members has 2"),
    ],
)
def test_members_that_make_no_sense_are_refused(sites, members, words):
    with pytest.raises(BadInput, match=words):
        replace(sites.config(), members=members)


def test_a_mixer_with_members_may_be_reached_from_elsewhere(sites):
    assert sites.config(host="10.0.0.1").host == "10.0.0.1"


def test_the_command_reads_its_members_from_a_file(sites, monkeypatch):
    seen = []
    monkeypatch.setattr("fedveil.mixing.mixer.run_mixer", seen.append)
    listed = sites.folder / "members.txt"
    listed.write_text("north\nsouth\neast\n")
    config = sites.config()
    files = {name: getattr(config, name) for name in ("certificate", "key", "clients_ca", "opened")}
    sizes = {"positions": 6, "minimum": 2, "expected": 3, "rounds": 3}
    mixer(**sizes, **files, members=listed)
    assert seen == [config]
    with pytest.raises(BadInput, match=r"mixer\.certificate is missing"):
        mixer(**sizes)
    mixer(**sizes, simulated=True)
    assert seen[1].simulated
