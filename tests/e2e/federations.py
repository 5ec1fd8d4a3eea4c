"""A live federation for the tests: one SuperLink and its SuperNodes, used for several recipes.

Every message has a process of its own, which reads the site's folder anew: so another recipe only
has to be put in place, with the keys that SuperLink knows.
"""

import json
import os
import re
import shutil
import signal
import time
from contextlib import contextmanager
from pathlib import Path

from fedveil.flower.deployment import Address, load_for_sites
from fedveil.flower.local_federation import LocalFederation, free_ports
from fedveil.flower.one_machine import write_trial
from fedveil.privacy.ledger.file import read_charges

PATIENCE = 600.0
"""Seconds after which something is said to be stuck, on a machine that is very busy."""

QUICK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "OMP_NUM_THREADS": "1"}
SAID = ("epsilon", "delta", "unit", "neighbours", "trust", "accountant", "noise", "as_published")
"""What a claim says, but for its assumptions: a federation has more of them."""

FORK_SERVER = "fork-server"
BAD_SITE = Path(__file__).with_name("bad_site.py")


def write_all(folder, recipe, settings, names, address, deadline):
    """Deploy a recipe with its own data divided, and let every owner join."""
    chosen = load_for_sites(recipe, settings, len(names), divided=True)
    mixer = None
    if chosen.shuffle is not None:
        (port,) = free_ports(1)
        mixer = Address(port=port)
    parts = {"superlink": address, "deadline": deadline, "mixer_address": mixer}
    write_trial(folder, chosen, chosen.load_data(), names, **parts)


class Live:
    """SuperLink and sites that are running, and what is put in place for them."""

    def __init__(self, folder, names, address, federation):
        self.folder, self.names, self.address = folder, names, address
        self.federation = federation
        self.server = folder / "server"
        self.url = f"https://{address}"

    def site(self, name):
        """The folder of a joined site."""
        return self.folder / "sites" / name

    def owner(self, name):
        """The folder of a site's owner."""
        return self.folder / "owners" / name

    def use(self, recipe, *settings, deadline=PATIENCE, minimum=1, repeats=0):
        """Put another recipe in place; sites have new ledgers, and `repeats` to spare."""
        scratch = self.folder.with_name("scratch")
        write_all(scratch, recipe, settings, self.names, self.address, deadline)
        for name in self.names:
            place, fresh = self.site(name), scratch / "sites" / name
            shutil.rmtree(self.owner(name) / "ledger", ignore_errors=True)
            self.owner(name).with_name(f"{name}.head.json").unlink(missing_ok=True)
            shutil.rmtree(self.folder / "shares" / name)
            shutil.copytree(scratch / "shares" / name, self.folder / "shares" / name)
            for file in ("recipe.toml", "site.toml"):
                shutil.copy(fresh / file, place)
            text = (scratch / "owners" / name / "policy.toml").read_text()
            if repeats:  # turns to spare cost more than the recipe's own
                text = re.sub(r"epsilon.client = [\d.]+", "epsilon.client = 5.0", text)
                text += f"repeats = {repeats}\n"
            (self.owner(name) / "policy.toml").write_text(text)
        shutil.rmtree(self.server / "test")
        shutil.copytree(scratch / "server" / "test", self.server / "test")
        shutil.copy(scratch / "server" / "recipe.toml", self.server)
        if (scratch / "mixer").exists():
            shutil.copytree(scratch / "mixer", self.folder / "mixer")
            for name in ("mixer-ca.crt", "collector.crt", "collector.key"):
                shutil.copy(scratch / "server" / name, self.server)
            for name in ("mixer-ca.crt", "member.crt", "member.key"):
                for site in self.names:
                    shutil.copy(scratch / "sites" / site / name, self.site(site))
        text = (scratch / "server" / "federation.toml").read_text()
        for name in self.names:
            known = (self.server / "nodes" / f"{name}.pub").read_text().strip()
            text = re.sub(rf'key = "[^"]* {name}"', f'key = "{known}"', text)
        text = re.sub(r"minimum = \d+", f"minimum = {minimum}", text)
        (self.server / "federation.toml").write_text(text)
        shutil.rmtree(scratch)

    def run(self, directory):
        """Run to the end; returns the result."""
        process = self.federation.start_run(directory)
        process.wait(PATIENCE)
        result = self.federation.read_result(directory)
        assert result is not None, process.output
        return result

    def asks(self, directory):
        """What the server noted of its asks and their outcomes."""
        path = self.server / directory / "sites.jsonl"
        lines = path.read_text().split("\n") if path.exists() else []
        return [json.loads(line) for line in lines if line]

    def outcomes(self, directory):
        return [line for line in self.asks(directory) if "answered" in line]

    def charges(self, name):
        """What a site was charged for."""
        path = self.owner(name) / "ledger" / "ledger.db"
        return read_charges(path) if path.exists() else []

    def stranger(self, name, **changes):
        """A site's folder that nobody registered, with changes to how it is started."""
        place = self.site(name)
        shutil.copytree(self.site(self.names[0]), place)
        for file in ("node", "node.pub"):
            shutil.copy(self.owner(self.names[0]) / file, place)
        script = place / "supernode.sh"
        (port,) = free_ports(1)
        text = re.sub(r"port=\d+", f"port={port}", script.read_text())
        text = re.sub(r'private-key "[^"]*"', "private-key node", text)
        for old, new in changes.items():
            text = text.replace(f"--{old.replace('_', '-')}", new)
        script.write_text(text)
        return place

    def turned_away(self, name):
        """Start it, and see it end; returns what it said."""
        process = self.federation.start_site(name)
        code = process.wait(PATIENCE)
        del self.federation.sites[name]
        shutil.rmtree(self.site(name))
        assert code != 0
        assert "SuperNode ID" not in process.output
        return process.output

    def server_app(self):
        """The process of the ServerApp."""
        found = processes_of(self.server)
        (pid,) = [pid for pid, program in found if program == "operator-flwr-serverapp"]
        return pid

    def kill_server_app(self):
        """Kill the ServerApp, and nothing else."""
        os.kill(self.server_app(), signal.SIGKILL)

    def fork_servers(self, name):
        """The processes of a site that have imported what answers messages."""
        found = processes_of(self.site(name))
        servers = {pid for pid, program in found if program == FORK_SERVER}
        return [pid for pid in servers if parent_of(pid) not in servers]  # not what they forked

    def kill_superlink(self):
        """Kill SuperLink as a power cut would; what it started ends by itself."""
        self.federation.superlink.kill()
        wait_for(lambda: not processes_of(self.server), "ended with SuperLink")


@contextmanager
def live(folder, *names, bad=(), offline=(), unforked=()):
    """A federation that is running.

    `bad` are sites that misbehave, `offline` are not started, and `unforked` have a program started
    for every message.
    """
    port, operators, *own = free_ports(2 + len(names))
    address = Address(port=port, site_ports=tuple(own), operator_port=operators)
    settings = ("sample.kind=all", "rounds=1")
    write_all(folder, "fedavg", settings, names, address, PATIENCE)
    for name in bad:
        program = folder / "sites" / name / "bin" / "flower-superexec"
        program.write_text(f'#!/bin/sh\nexec python3 {BAD_SITE} {name} "$@"\n')
    for name in unforked:
        (folder / "sites" / name / "bin" / "flower-superexec").unlink()
    with LocalFederation(folder, **QUICK) as federation:
        found = Live(folder, names, address, federation)
        federation.start_superlink(found.url)
        federation.register()
        for name in names:
            if name not in offline:
                federation.start_site(name)
        federation.wait_until_connected()
        yield found
    wait_for(lambda: not processes_of(folder), "all ended")


def wait_for(holds, what):
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"not {what} in time"
        time.sleep(0.05)


def parent_of(pid):
    """The parent of a process, 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def peak_of(pid):
    """The most memory that a process had at once, in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) // 1024


def processes_of(folder):
    """The processes that keep Flower's files below a folder: id and program."""
    home = f"FLWR_HOME={folder}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if not any(
                line.startswith(home) for line in (place / "environ").read_bytes().split(b"\0")
            ):
                continue
            if (place / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            words = (place / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        programs = [Path(word).name for word in words[:4] if word != "fedveil.flower.flwr_private"]
        named = [
            name
            for name in programs[:3]
            if name.startswith(("flwr", "flower", "operator-", "fedveil.", FORK_SERVER))
        ]
        found.append((int(place.name), named[0] if named else programs[0]))
    return found
