"""A federation between network namespaces, each party with a user and files of its own.

    python -m tests.e2e.namespaces [FOLDER]

A server and three owners: init, deploy, join, run, kill -9 of a site and of the server's program,
resume, predict. A party sees its own folder and a public one, through which keys and bundles go. A
site reaches one port of the server and no other site. Needs root, for namespaces and users: without
them it prints one line, and exits with 0.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedveil.flower.local_federation import Process, stop_all
from tests.flower.wards import NAMES, PEOPLE, PER_PERSON, rows, write_files

SERVER, HOST, PORT = "university", "10.77.0.1", 9092
PARTIES = (SERVER, *NAMES)
FIRST_USER, PATIENCE = 20001, 300.0
REPOSITORY = Path(__file__).parents[2]


def obstacle() -> str:
    """Why namespaces and users are not to be had here, "" if they are."""
    if os.geteuid() != 0:
        return "network namespaces and users need root"
    for program in ("ip", "setpriv", "mount"):
        if shutil.which(program) is None:
            return f"there is no {program}: install iproute2 and util-linux"
    probe = f"fv-probe-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if tried.returncode:
        return f"ip netns add: {tried.stderr.strip()}"
    inside = ["ip", "netns", "exec", probe, "mount", "-t", "tmpfs", "none", "/mnt"]
    tried = subprocess.run(inside, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return f"mount in a namespace: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True)
class Party:
    """Somebody with a network, a user and a folder of their own.

    Attributes:
        name: The name, which is that of the folder.
        base: The folder with `homes`, and with `public`, which everybody reads.
        user: The number of the user and of the group.
        namespace: The name of the network namespace.
    """

    name: str
    base: Path
    user: int
    namespace: str

    @property
    def home(self) -> Path:
        """The party's own folder."""
        return self.base / "homes" / self.name

    def command(self, *arguments: object) -> list[str]:
        """The command that runs a program as this party, where nobody else's files are."""
        homes, own = self.base / "homes", self.home
        script = [
            "set -e",
            f"mount --bind {own} /mnt",
            f"mount -t tmpfs -o mode=755 none {homes}",
            f"mkdir {own}",
            f"mount --bind /mnt {own}",
            "umount /mnt",
        ]
        closed = closed_folder()
        if closed is not None:  # Python is where other users may not look: they see Python alone
            script += [
                f"mount --bind {sys.base_prefix} /mnt",
                f"mount -t tmpfs -o mode=755 none {closed}",
                f"mkdir -p {sys.base_prefix}",
                f"mount --bind /mnt {sys.base_prefix}",
                "umount /mnt",
            ]
        user = f"setpriv --reuid {self.user} --regid {self.user} --clear-groups"
        script += [f"cd {own}", f'exec {user} "$@"']
        return [
            *("ip", "netns", "exec", self.namespace, "sh", "-c", "\n".join(script), "sh"),
            *map(str, arguments),
        ]

    @property
    def environment(self) -> dict[str, str]:
        """A new environment: nothing of whoever started this script."""
        programs = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        quick = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "OMP_NUM_THREADS": "1"}
        return {"PATH": programs, "HOME": str(self.home), "LANG": "C.UTF-8", **quick}

    def run(self, *arguments: object, code: int = 0) -> str:
        """Run a program to its end; returns what it printed."""
        done = subprocess.run(
            self.command(*arguments), env=self.environment, capture_output=True, text=True
        )
        if done.returncode != code:
            raise AssertionError(f"{self.name}: {arguments}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def fedveil(self, *arguments: object) -> str:
        """Run a command of fedveil."""
        return self.run("python3", "-m", "fedveil", *arguments)

    def start(self, script: str, log: str) -> Process:
        """Start a script in the background, with its log beside the homes."""
        command = self.command("sh", script)
        return Process.launch(log, command, self.base / f"{log}.log", self.environment)

    def reaches(self, host: str, port: int) -> bool:
        """Whether a connection from here to a port is taken."""
        program = (
            f"import socket, sys\nsys.exit(socket.socket().connect_ex(({host!r}, {port})) != 0)"
        )
        command = self.command("timeout", "3", "python3", "-c", program)
        return subprocess.run(command, env=self.environment, capture_output=True).returncode == 0


def closed_folder() -> Path | None:
    """The highest folder above Python that other users may not enter, None if they may."""
    for folder in reversed(Path(sys.base_prefix).parents):
        if not stat.S_IMODE(folder.stat().st_mode) & stat.S_IXOTH:
            return folder
    return None


@contextmanager
def parties(base: Path) -> Iterator[dict[str, Party]]:
    """The parties, each site's network joined to the server's by a cable of its own."""
    tag = f"fv{os.getpid()}"
    found = {
        name: Party(name, base, FIRST_USER + k, f"{tag}-{name}") for k, name in enumerate(PARTIES)
    }

    def ip(*arguments: object) -> None:
        subprocess.run(["ip", *map(str, arguments)], check=True)

    made = []
    try:
        for party in found.values():
            ip("netns", "add", party.namespace)
            made.append(party.namespace)
            ip("-n", party.namespace, "link", "set", "lo", "up")
            party.home.mkdir(parents=True, mode=0o700)
            os.chown(party.home, party.user, party.user)
        server = found[SERVER].namespace
        ip("-n", server, "addr", "add", f"{HOST}/32", "dev", "lo")
        for k, name in enumerate(NAMES, start=1):
            site, here, there = found[name].namespace, f"{tag}s{k}", f"{tag}c{k}"
            ip("link", "add", here, "netns", server, "type", "veth", "peer", there, "netns", site)
            for namespace, link, last in ((server, here, 1), (site, there, 2)):
                ip("-n", namespace, "addr", "add", f"10.77.{k}.{last}/30", "dev", link)
                ip("-n", namespace, "link", "set", link, "up")
            ip("-n", site, "route", "add", HOST, "via", f"10.77.{k}.1")
        yield found
    finally:
        for namespace in made:
            ip("netns", "del", namespace)


def give(source: Path, target: Path, party: Party | None = None) -> None:
    """Copy a file or folder to a party, or for everybody to read."""
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
    for path in (target, *target.rglob("*")):
        if party is None:
            path.chmod(0o755 if path.is_dir() else 0o644)
        else:
            os.chown(path, party.user, party.user)


def wait_for(holds: object, what: str) -> None:
    """Wait until a function returns something true."""
    until = time.monotonic() + PATIENCE
    while not holds():  # type: ignore[operator]
        if time.monotonic() > until:
            raise AssertionError(f"not {what} in time")
        time.sleep(0.05)


def prepare(base: Path, found: dict[str, Party]) -> None:
    """Tables, keys, deployment and bundles: all that comes before a program is started."""
    public, files = base / "public", base / "files"
    public.mkdir(mode=0o755)
    files.mkdir(mode=0o700)
    write_files(files, PER_PERSON)
    university = found[SERVER]
    for name in NAMES:
        owner = found[name]
        give(files / f"{name}.csv", owner.home / "records.csv", owner)
        owner.fedveil("site", "init", "owner", "--name", name, "--records", "records.csv")
        give(owner.home / "owner" / "node.pub", public / f"{name}.pub")
    for file in ("wards.toml", "net.py", "public.csv"):
        give(files / file, university.home / file, university)
    keys = [part for n in NAMES for part in ("--key", f"{n}={public / n}.pub")]
    people = [part for n, k in PEOPLE.items() for part in ("--people", f"{n}={k}")]
    told = university.fedveil(
        *("deploy", "wards.toml", "fed", "--sites", ",".join(NAMES), *keys, *people),
        *("--test", "public.csv", "--allow-code", "--deadline", "60"),
        *("--address", f"{HOST}:{PORT}"),
    )
    (line,) = [line for line in told.splitlines() if line.startswith("tell the owners")]
    give(university.home / "fed" / "bundles", public / "bundles")
    for name in NAMES:
        accepting = ("--accept", "--allow-code", "--operator", line.split()[-1], "--repeats", "1")
        bundle = public / "bundles" / name
        told = found[name].fedveil("site", "join", bundle, "--owner", "owner", *accepting)
        assert "epsilon.person = " in told, told


def demonstrate(base: Path) -> str:
    """Do everything in a folder; returns the claim of the run."""
    with parties(base) as found:
        base.chmod(0o755)
        prepare(base, found)
        university, run = found[SERVER], found[SERVER].home / "fed" / "server" / "run"
        started: list[Process] = []

        def start(party: Party, script: str, log: str) -> Process:
            started.append(party.start(script, log))
            return started[-1]

        def site(name: str) -> Process:
            process = start(found[name], "owner/federations/wards/supernode.sh", name)
            before = process.output.count("SuperNode ID:")
            process.wait_for(
                lambda: process.output.count("SuperNode ID:") > before, "connected", PATIENCE
            )
            return process

        def asked(number: int) -> bool:
            path = run / "sites.jsonl"
            text = path.read_text() if path.exists() else ""
            return any(json.loads(x).get("asking") == number for x in text.split("\n") if x)

        try:
            start(university, "fed/server/superlink.sh", "superlink")
            university.run("sh", "fed/server/register.sh")
            sites = {name: site(name) for name in NAMES}
            north = found["north"]
            assert north.reaches(HOST, PORT)
            assert not north.reaches(HOST, PORT + 1), "operators are on the server's loopback"
            assert not north.reaches("10.77.2.2", 22), "sites are not joined"
            assert north.run("ls", base / "homes").split() == ["north"]

            first = start(university, "fed/server/run.sh", "run")
            wait_for(lambda: asked(2), "asked for round 2")
            sites["south"].kill()
            apps = processes_of(university.user, "flwr-serverapp")
            assert apps, "the server's program runs"
            for pid in apps:
                os.kill(pid, 9)
            assert first.wait(PATIENCE) == 1, first.output
            site("south")
            second = start(university, "fed/server/run.sh", "again")
            assert second.wait(PATIENCE) == 0, second.output
            result = json.loads((run / "result.json").read_text())
            assert (result["rounds"], result["stopped"]) == (3, "rounds")
            claim = result["claims"][0]
            kind = [claim[key] for key in ("unit", "trust", "noise")]
            assert kind == ["person", "site", "secure"], kind
            for name in NAMES:
                assert "per person" in found[name].fedveil("ledger", "owner/ledger")
                told = found[name].fedveil("ledger", "owner/ledger", "--verify")
                assert "none changed, removed, inserted or moved" in told, told
            give(run, base / "public" / "model")
            (north.home / "new.csv").write_text(rows(4, 99))
            (north.home / "new.csv").chmod(0o644)
            place = north.home / "owner" / "federations" / "wards"
            moved = f"cd {place} && python3 -m fedveil predict {base}/public/model ~/new.csv"
            told = north.run("sh", "-c", f"{moved} --allow-code")
            assert len([x for x in told.splitlines() if x.startswith(("yes,", "no,"))]) == 4, told
            return f"epsilon {claim['epsilon']:.4g} at delta {claim['delta']:g} per {kind[0]}"
        finally:
            stop_all(started)
            for party in found.values():  # what a program left behind in its own namespace
                left = ["ip", "netns", "pids", party.namespace]
                pids = subprocess.run(left, capture_output=True, text=True, check=True).stdout
                for pid in pids.split():
                    os.kill(int(pid), 9)


def processes_of(user: int, program: str) -> list[int]:
    """The processes of a user with a program's name in their command."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
            if folder.stat().st_uid == user and program.encode() in line:
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


def main(arguments: list[str]) -> int:
    """Run it, or say in one line why not."""
    reason = obstacle()
    if reason:
        print(f"skipped: {reason}")
        return 0
    base = Path(arguments[0] if arguments else tempfile.mkdtemp(prefix="fedveil-namespaces-"))
    base.mkdir(parents=True, exist_ok=True)
    print(f"done: {demonstrate(base)}; logs are in {base}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
