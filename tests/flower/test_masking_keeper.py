"""The process with a site's masking keys: they outlive messages, and nothing else reaches them."""

import os
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedveil.base.errors import BadInput
from fedveil.base.platforms import can_fork
from fedveil.flower import masking_keeper
from fedveil.flower.masking_keeper import KeeperProcess, KeeperStep, KeeperTask, MaskingKeeper
from fedveil.masking.masking_site import MaskingSite
from fedveil.masking.sum_messages import MessageRefused, Place, SumTerms
from fedveil.masking.sum_server import SumServer
from tests.flower.summing import SUMMED, Summing, private_key
from tests.masking.parties import public

pytestmark = pytest.mark.skipif(not can_fork(), reason="sites run on Linux")


@pytest.fixture
def task(tmp_path):
    """Makes tasks of three sites in this folder."""
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(3)]
    for number, key in enumerate(keys):
        (tmp_path / str(number)).write_bytes(private_key(key))
    terms = SumTerms(bytes(32), tuple(map(public, keys)), 2, 3, 5)

    def make(step, number=0, place=1):
        journal = str(tmp_path / f"ledger{number}" / "sums.db")
        return KeeperTask(step, terms, number, str(tmp_path / str(number)), journal, Place(place))

    return make


@pytest.fixture
def process():
    found = KeeperProcess()
    yield found
    found.close()


def children():
    """The processes that this one started. Other tests may have left some, such as a pool's."""
    found = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True)
    return {*map(int, found.stdout.split())}


def in_fork(work):
    """What `work` returns, in a process of its own: bytes."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            os.write(writable, work())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        content = pipe.read()
    os.waitpid(pid, 0)
    return content


def test_tasks_are_read_as_they_were_written(task):
    for step in KeeperStep:
        assert KeeperTask.from_json(task(step, 2, 7).to_json()) == task(step, 2, 7)


def test_every_message_has_a_process_and_all_of_them_the_same_keys(task, process):
    adverts = {in_fork(lambda: process.perform(task(KeeperStep.KEYS), b"")) for _ in range(3)}
    assert len(adverts) == 1
    assert process.perform(task(KeeperStep.KEYS), b"") in adverts
    other = KeeperProcess()
    assert other.perform(task(KeeperStep.KEYS), b"") not in adverts
    other.close()


def test_a_whole_sum_whose_every_step_is_in_a_process_of_its_own(task, process):
    """Of three sites, one in the keeper's process and two here; one drops out."""
    here = [MaskingKeeper(), MaskingKeeper()]
    keepers = [process, *here]
    server = SumServer(task(KeeperStep.KEYS).terms)

    def perform(step, number, content=b""):
        return (
            in_fork(lambda: keepers[number].perform(task(step, number), content))
            if not (number)
            else keepers[number].perform(task(step, number), content)
        )

    for number in range(3):
        server.add_advert(perform(KeeperStep.KEYS, number))
    roster = server.open(Place(1))
    vectors = np.arange(15, dtype="<i8").reshape(3, 5) - 7
    for number in range(3):
        perform(KeeperStep.BEGIN, number, roster)
    for number in (0, 2):
        server.add_masked(perform(KeeperStep.MASK, number, vectors[number].tobytes()))
    closings = server.close()
    for number in (0, 2):
        server.add_agreed(perform(KeeperStep.ANSWER, number, closings[number]))
    certificate = server.certify()
    for number in (0, 2):
        server.add_reveal(perform(KeeperStep.REVEAL, number, certificate))
    assert server.sum(100).tolist() == (vectors[0] + vectors[2]).tolist()


def test_refusals_and_errors_arrive_as_they_are_and_the_keys_stay(task, process, tmp_path):
    advert = process.perform(task(KeeperStep.KEYS), b"")
    with pytest.raises(MessageRefused, match="is no roster"):
        process.perform(task(KeeperStep.BEGIN), b"x" * 50)
    with pytest.raises(MessageRefused, match="not the round that was begun last"):
        process.perform(task(KeeperStep.MASK), bytes(40))
    (tmp_path / "2").write_text("no key")
    with pytest.raises(BadInput, match="cannot be read as a private key"):
        process.perform(task(KeeperStep.KEYS, 2), b"")
    assert process.perform(task(KeeperStep.KEYS), b"") == advert


def test_a_process_that_dies_while_it_asks_stops_nobody(task, process):
    advert = process.perform(task(KeeperStep.KEYS), b"")

    def half():
        import socket

        mine, other = socket.socketpair()
        socket.send_fds(process._door, [b"."], [other.fileno()])
        other.close()
        mine.sendall((99).to_bytes(8, "big") + b"half")
        return b"sent"

    assert in_fork(half) == b"sent"
    assert process.perform(task(KeeperStep.KEYS), b"") == advert
    import socket

    socket.send_fds(process._door, [b"."], [])  # no connection comes with it
    assert process.perform(task(KeeperStep.KEYS), b"") == advert


def test_keys_end_with_their_process_and_another_one_has_others(task, monkeypatch):
    monkeypatch.setattr(masking_keeper, "_running", None)
    masking_keeper.keep_running()
    first = masking_keeper.running_keeper()
    advert = first.perform(task(KeeperStep.KEYS), b"")
    masking_keeper.keep_running()
    assert masking_keeper.running_keeper() is first
    assert not first.ended
    first._door.shutdown(2)  # as if it had died
    until = time.monotonic() + 10
    while not first.ended and time.monotonic() < until:
        time.sleep(0.01)
    assert first.ended
    with pytest.raises(BadInput, match="masking keys has ended"):
        first.perform(task(KeeperStep.KEYS), b"")
    masking_keeper.keep_running()
    assert masking_keeper.running_keeper() is not first
    assert masking_keeper.running_keeper().perform(task(KeeperStep.KEYS), b"") != advert
    masking_keeper.running_keeper().close()


def test_it_ends_with_those_who_can_reach_it(task):
    before = children()
    process = KeeperProcess()
    process.perform(task(KeeperStep.KEYS), b"")
    (keeper,) = children() - before
    process.close()
    assert os.waitpid(keeper, 0) == (keeper, 0)  # nobody holds the other end any more


FORKS = """
import os, sys
from fedveil.flower.flwr_private import fork_server, guard

def answer(arguments):
    from pathlib import Path
    from hashlib import sha256
    from dataclasses import replace
    from fedveil.flower.masking_keeper import running_keeper
    from fedveil.flower.messages import SumStep, bytes_tensor
    from fedveil.flower.prepared_site import open_site
    site = open_site(Path(os.environ["FEDVEIL_SITE"]))
    step = SumStep("0" * 32, 1, 0, site.digest, site.name, bytes_tensor(b""))
    reply = site.answer(step)
    if arguments[0] == "end":
        running_keeper()._door.shutdown(2)
    print(os.getpid(), sha256(reply.encoded).hexdigest(), flush=True)

guard.answer_message = answer
guard.run_canary = lambda: None
guard.guard = lambda: None
fork_server.IMPORTED = ("fedveil.flower.prepared_site", "fedveil.flower.federation_files")
fork_server.serve_forks()
"""


def test_the_fork_server_keeps_keys_over_messages_and_policies(tmp_path):
    """Its forks reach one keeper; it outlives a change of policy, and is replaced if it ends."""
    summing = Summing(tmp_path, SUMMED, 3)
    path = tmp_path / "north" / "site.toml"
    command = [sys.executable, "-c", FORKS]
    environment = {**os.environ, "FEDVEIL_SITE": str(path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as server:

        def ask(word):
            server.stdin.write(f'["{word}"]\n')
            server.stdin.flush()
            return server.stdout.readline().split()

        first, second = ask("keys"), ask("keys")
        assert first[0] != second[0]
        assert first[1] == second[1]
        policy = summing.folder / "north" / "policy.toml"
        policy.write_text("steps = 7\n" + policy.read_text())
        assert ask("keys")[1] == first[1]
        assert ask("end")[1] == first[1]
        time.sleep(0.2)
        assert ask("keys")[1] not in ("", first[1])
        server.stdin.close()
        assert server.wait(30) == 0


def test_a_keeper_masks_with_the_key_of_its_site_alone(task):
    keeper = MaskingKeeper()
    wrong = task(KeeperStep.KEYS)
    swapped = KeeperTask(**{**vars(wrong), "number": 1})
    with pytest.raises(BadInput, match="is not that of site 1"):
        keeper.perform(swapped, b"")
    assert all(isinstance(site, MaskingSite) for site in keeper._sites.values())
