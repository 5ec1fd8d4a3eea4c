"""What a server does per round, piece by piece: the unit costs behind docs/scale.md.

python benchmarks/scale.py            prints the table of unit costs
python benchmarks/scale.py clients N  simulates N clients, memory-mapped, and prints time and memory

Times are seconds of a core (CPU time), the best of a few repetitions; a disk's come on top.
"""

import argparse
import asyncio
import json
import math
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

import fedveil as fv
from fedveil.mixing.mixer import MixerConfig, serve
from fedveil.mixing.protocol import collect, send_report
from fedveil.models import zoo
from fedveil.privacy.ledger.hash_chain import Head
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.release import Round
from fedveil.privacy.releases.two_point import two_point
from fedveil.privacy.secure import with_secure_noise
from fedveil.runs import checkpoint
from fedveil.training.exchange import server_sum
from fedveil.training.gradients.modes import Mode
from fedveil.training.reports import ClientReports, CohortSum, Rows
from fedveil.training.server import ServerState, SgdServer

FREE = fv.Budget(math.inf, 1e-8)
NUMBERS = 1 << 25
"""float32 numbers of a block of reports: 128 MiB."""

RECORDS, FEATURES = 2, 10


@dataclass(frozen=True)
class Cost:
    """What one thing costs: seconds and bytes per unit."""

    name: str
    unit: str
    seconds: float | None = None
    bytes: float | None = None

    def row(self) -> str:
        took = "" if self.seconds is None else _time(self.seconds)
        size = "" if self.bytes is None else f"{self.bytes:,.4g}"
        return f"| {self.name} | {self.unit} | {took} | {size} |"


def _time(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:,.3g} {unit}"
    return f"{seconds * 1e9:,.3g} ns"


def best(work: Callable[[], object], times: int = 3) -> float:
    """The seconds of a core in the cheapest repetition: others on the machine do not count."""
    found = []
    for _ in range(times):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def central(clients: int, rate: float = 1e-3, rounds: int = 1000) -> PrivacyPlan:
    return fv.central(
        fv.samplers.Poisson(rate),
        clients,
        fv.clips.Fixed(1.0),
        rounds=rounds,
        budget=FREE,
        multiplier=1.0,
    )


def round_of(plan: PrivacyPlan, size: int, clients: int) -> Round:
    """A round of a server that only receives: nobody's records are looked at."""
    start = torch.zeros(size)
    state = plan.first_state(start)
    return Round(1, np.arange(clients), start, plan.clip(state, 1), state, Streams(1))


def received(plan: PrivacyPlan, rows: torch.Tensor) -> float:
    """Seconds to accept reports and add them to their sum, per number."""
    count, size = rows.shape
    round, nobody = round_of(plan, size, count), torch.zeros(count, dtype=torch.bool)
    total = CohortSum.zero(size, plan.width, noisy=plan.release.adds_noise)
    statistic, weights = torch.zeros(count, plan.width), torch.ones(count, dtype=torch.float64)

    def work() -> None:
        sent = ClientReports(Rows.from_reports(rows, size), statistic, nobody, nobody)
        server_sum([(total, slice(None))], plan, round, sent, weights)

    return best(work) / rows.numel()


def reports() -> list[Cost]:
    found = []
    for size in (10**5, 10**6, 10**7):
        rows = torch.randn(max(1, NUMBERS // size), size) / size
        seconds = received(central(max(1000, len(rows))), rows)
        name = f"accept and sum a clipped report (P = {size:,})"
        found.append(Cost(name, "coordinate", seconds, 4.0))
    size, clients = 10**5, 300
    ranges = Ranges(0.0, 0.5, (size,), adaptive=False, perturb=Perturb.UPDATE)
    plan = two_point(fv.samplers.Everyone(), clients, ranges, epsilon=1.0, rounds=1, budget=FREE)
    rows, round = torch.zeros(clients, size), round_of(plan, size, clients)
    took = best(lambda: plan.release.randomise_(rows.zero_(), round), 1) / rows.numel()
    found.append(Cost("a client's two-point report (P = 100,000)", "coordinate", took, 1 / 8))
    seconds = received(plan, rows)
    found.append(Cost("accept and sum a two-point report (P = 100,000)", "coordinate", seconds))
    return found


def noise() -> list[Cost]:
    size, found = 10**6, []
    for name, plan in (
        ("Gaussian noise on the sum, seeded", central(1000)),
        (
            "Gaussian noise on the sum, secure",
            with_secure_noise(central(1000), size, diagnostics=False),
        ),
    ):
        total = torch.zeros(size, dtype=torch.float64)
        given = total, fv.clips.Clip(1.0), 1, Streams(1, plan.secure)
        found.append(Cost(name, "coordinate", best(partial(plan.release.noise_, *given)) / size))
    return found


def sampling() -> list[Cost]:
    found = []
    for clients in (10**5, 10**6, 10**7):
        for name, sampler, secure in (
            ("Poisson, rate 1e-3", fv.samplers.Poisson(1e-3), False),
            ("Poisson, rate 1e-3, secure", fv.samplers.Poisson(1e-3), True),
            ("fixed size N / 1000", fv.samplers.FixedSize(clients // 1000), False),
        ):
            seconds = best(partial(sampler.cohort, clients, 1, Streams(1, secure), None))
            found.append(Cost(f"draw a cohort, N = {clients:,}: {name}", "round", seconds))
    return found


def ledger_costs() -> list[Cost]:
    """Charges on disk, with and without clients' own turns, and how the file grows."""
    found = []
    for clients, cohort in ((0, 0), (10**6, 10**3), (10**6, 10**5), (10**7, 10**5)):
        rounds = 20 if clients else 2000
        if clients:
            plan = fv.client_noise(
                fv.samplers.RoundRobin(cohort),
                clients,
                fv.clips.Fixed(1.0),
                laplace=False,
                rounds=rounds,
                budgets=(FREE,),
                multiplier=1.0,
            )
        else:
            plan = central(10**6, rounds=rounds)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ledger.db"
            ledger = Ledger.create(
                path, LedgerRun({"run": "scale"}, plan.lines, plan.permitted, plan.counted_clients)
            )
            seconds, empty = [], path.stat().st_size
            for r in range(1, rounds + 1):
                first = (r - 1) * cohort % max(clients, 1)
                ids = np.arange(first, first + cohort) if clients else None
                began = time.process_time()
                ledger.charge(r, ids)
                seconds.append(time.process_time() - began)
            ledger.close()
            size = (path.stat().st_size - empty) / rounds
        said = f"own turns of {clients:,} clients, cohort {cohort:,}" if clients else "central"
        found.append(Cost(f"charge a round: {said}", "round", statistics.median(seconds), size))
    return found


def server_costs() -> list[Cost]:
    """The step and the checkpoint of 10 million parameters."""
    size, found = 10**7, []
    params, mean = torch.zeros(size), torch.randn(size, dtype=torch.float64)
    server = SgdServer(lr=1.0, momentum=0.9)
    state = server.step(ServerState(0, params, {}, torch.zeros(1)), mean)
    seconds = best(lambda: server.step(state, mean))
    found.append(Cost("the server's step with momentum", "coordinate", seconds / size))
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "checkpoint"
        head = Head(0, "0" * 64)
        seconds = best(lambda: checkpoint.save(where, state, head))
        bytes_ = next(where.iterdir()).stat().st_size / size
    found.append(Cost("a checkpoint, with momentum", "coordinate", seconds / size, bytes_))
    return found


def shuffler() -> list[Cost]:
    """A mixer in this process and clients that send to it over loopback, on one core together."""
    positions, count = 10**5, 40

    async def mixed() -> float:
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        sizes = {"positions": positions, "minimum": count, "expected": count}
        config = MixerConfig(**sizes, deadline=120.0, simulated=True)
        mixer = asyncio.create_task(serve(config, ready.set_result))
        port, high = await ready, np.zeros(positions, dtype=bool)
        began = time.process_time()
        for _ in range(count // 8):
            place = config.host, port, 1
            await asyncio.gather(*(send_report(*place, high, minimum=count) for _ in range(8)))
        took = time.process_time() - began
        await collect(config.host, port, 1, positions, minimum=count)
        await mixer
        return took

    seconds = asyncio.run(mixed()) / (positions * count)
    return [Cost("a message through the shuffler, client and mixer", "coordinate", seconds, 4.0)]


def mapped(clients: int) -> fv.FederatedData:
    """Records of so many clients, written in pieces and mapped: never in memory as a whole."""
    random, piece = np.random.default_rng(3), 1 << 20
    records = clients * RECORDS
    with tempfile.TemporaryDirectory(dir=os.environ.get("SCALE_DISK")) as folder:
        x = np.lib.format.open_memmap(
            f"{folder}/x.npy", "w+", dtype=np.float32, shape=(records, FEATURES)
        )
        y = np.lib.format.open_memmap(f"{folder}/y.npy", "w+", dtype=np.float32, shape=(records,))
        for start in range(0, records, piece):
            drawn = random.standard_normal((min(piece, records - start), FEATURES), np.float32)
            x[start : start + len(drawn)], y[start : start + len(drawn)] = drawn, drawn[:, 0]
        x.flush()
        y.flush()
        del x, y
        files = [np.load(f"{folder}/{name}.npy", mmap_mode="r") for name in "xy"]
    offsets = np.arange(0, records + 1, RECORDS)
    return fv.FederatedData(*files, offsets, files[0][:10].copy(), files[1][:10].copy(), 0)


def simulated(clients: int) -> dict[str, float]:
    """A regression of 11 parameters; one client in a thousand takes part in a round of central DP.

    Rounds are whole, on one core: cohort, durable charge, clients, noise and step.
    """
    began = time.perf_counter()
    data = mapped(clients)
    built, rounds = time.perf_counter() - began, 12
    task = fv.Task(zoo.linear(FEATURES), fv.models.squared_error)
    plan = central(clients, rounds=rounds)
    work = fv.ClientSgd(fv.Batches(0, steps=1), lr=0.1)
    training = fv.Training(task, data, plan, work, mode=Mode.VECTORISED, every=10**6, workers=1)
    _ = training.streams  # the fingerprint of the records, which is read once
    ready = time.perf_counter() - began
    seconds, cores, met = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.db"
        ledger = Ledger.create(
            path, LedgerRun({"run": "scale"}, plan.lines, plan.permitted, plan.counted_clients)
        )
        began, used = time.perf_counter(), time.process_time()
        for result in training.rounds(training.start(), ledger):
            seconds.append(time.perf_counter() - began)
            cores.append(time.process_time() - used)
            met.append(result.clients)
            began, used = time.perf_counter(), time.process_time()
        ledger.close()
        size = path.stat().st_size
    return {
        "clients": clients,
        "cohort": statistics.mean(met),
        "seconds": statistics.median(seconds[2:]),
        "seconds_of_a_core": statistics.median(cores[2:]),
        "making_records": built,
        "checking_and_fingerprint": ready - built,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "ledger_bytes": size,
    }


def memory() -> Cost:
    """What a server needs beyond the process: a report, its sum, secure noise, step, checkpoint."""
    size = 10**7
    plan = with_secure_noise(central(1000), size, diagnostics=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    params = torch.zeros(size)
    round, nobody = round_of(plan, size, 1), torch.zeros(1, dtype=torch.bool)
    total = CohortSum.zero(size, plan.width, noisy=False)
    for _ in range(3):
        sent = ClientReports(
            Rows.from_reports(torch.randn(1, size), size), torch.zeros(1, 0), nobody, nobody
        )
        server_sum([(total, slice(None))], plan, round, sent, torch.ones(1, dtype=torch.float64))
        del sent
    total.total.zero_()  # on the grid that secure noise asks for, as reports of a run are
    plan.release.noise_(total.total, replace(round, streams=Streams(1, plan.secure)))
    total.total /= 100.0
    server = SgdServer(lr=1.0, momentum=0.9)
    state = server.step(ServerState(0, params, {}, torch.zeros(1)), total.total)
    state = server.step(state, total.total)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder) / "checkpoint", state, Head(0, "0" * 64))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Cost("memory of a server", "coordinate", None, (after - before) * 1024 / size)


def whole_rounds(costs: dict[str, Cost]) -> list[str]:
    """A round of central DP with secure noise on one core, put together from the unit costs.

    One client in a thousand is asked, and at least a hundred. Memory is a server's own, at its
    most, and the same for any cohort.
    """
    needed = costs["memory of a server"].bytes or 0.0

    def per(name: str) -> float:
        found = next(cost for key, cost in costs.items() if key.startswith(name))
        return found.seconds or 0.0

    once = per("Gaussian noise on the sum, secure") + per("the server's step")
    once += per("a checkpoint")
    lines = [
        "| clients | cohort | parameters | bytes in | bytes out | accept and sum | noise, step, "
        "checkpoint | memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for clients in (10**3, 10**4, 10**5, 10**6, 10**7):
        cohort = max(100, clients // 1000)
        for size in (10**5, 10**6, 10**7, 10**8):
            each = per(f"accept and sum a clipped report (P = {min(size, 10**7):,})")
            moved, room = _bytes(4 * cohort * size), _bytes(needed * size)
            lines.append(
                f"| {clients:,} | {cohort:,} | {size:,} | {moved} | {moved} "
                f"| {_time(each * cohort * size)} | {_time(once * size)} | {room} |"
            )
    return lines


def _bytes(count: float) -> str:
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= factor:
            return f"{count / factor:,.3g} {unit}"
    return f"{count / 1e3:,.3g} kB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["costs", "memory", "clients"], default="costs")
    parser.add_argument("clients", nargs="?", type=int, default=10**6)
    arguments = parser.parse_args()
    if arguments.what == "clients":
        print(json.dumps(simulated(arguments.clients)))
        return
    torch.set_num_threads(1)
    if arguments.what == "memory":
        print(memory().row())
        return
    print("| what | unit | time per unit | bytes per unit |")
    print("|---|---|---|---|")
    costs = {}
    for part in (
        lambda: [memory()],
        reports,
        noise,
        sampling,
        ledger_costs,
        server_costs,
        shuffler,
    ):
        for cost in part():
            costs[cost.name] = cost
            print(cost.row(), flush=True)
    print("\n".join(["", *whole_rounds(costs)]))


if __name__ == "__main__":
    main()
