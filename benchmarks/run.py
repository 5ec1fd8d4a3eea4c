"""`make bench`: the same work on fedveil and on its peers, in one go; writes benchmarks/RESULTS.md.

`make bench-growth`: how fedveil grows with clients and parameters; writes benchmarks/GROWTH.md.

Every measurement is a process of its own, and fedveil and its peers take turns on one machine. A
peer is measured in each of its configurations and the best one counts. A run that was cut off goes
on with what it kept in benchmarks/kept.jsonl.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from growth import CLIENTS, COHORTS, PARAMETERS
from work import WORK

HERE = Path(__file__).parent
RESULTS, GROWTH = HERE / "RESULTS.md", HERE / "GROWTH.md"
NOTES = HERE / "NOTES.md"
_TRIES = 3


@dataclass(frozen=True)
class Timing:
    """One configuration: the median of whole rounds, and examples per second where counted."""

    peer: str
    configuration: str
    seconds: float
    rate: float | None
    rounds: int


Call = tuple[Any, ...]
"""A script and its arguments."""

Found = dict[str, dict[str, list[Timing]]]
"""Per work item and peer, every configuration that was measured."""


class Failed(RuntimeError):
    """A measurement that printed no answer."""


@dataclass(frozen=True)
class Kept:
    """Answers kept in a file, so that a run that was cut off does not measure them again."""

    path: Path
    before: dict[str, list[dict[str, Any]]]

    @classmethod
    def open(cls, path: Path) -> "Kept":
        before: dict[str, list[dict[str, Any]]] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            call, answer = json.loads(line)
            before.setdefault(call, []).append(answer)
        return cls(path, before)

    def answer(self, script: str, *arguments: object) -> dict[str, Any]:
        call = " ".join(map(str, (script, *arguments)))
        if self.before.get(call):
            return self.before[call].pop(0)
        answer = measured(script, *arguments)
        with self.path.open("a") as file:
            file.write(json.dumps([call, answer]) + "\n")
        return answer


def measured(script: str, *arguments: object) -> dict[str, Any]:
    """The last line that a script printed, which is JSON."""
    command = [sys.executable, "-B", str(HERE / script), *map(str, arguments)]
    print("$", script, *arguments, flush=True)
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent / 'src'}:{HERE}"}
    for _ in range(_TRIES):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=1800, env=environment
        )
        try:  # a peer may stumble when it ends; what it measured is printed before that
            answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        except (IndexError, ValueError):
            continue
        return answer
    raise Failed(f"{script} {arguments}: {done.stderr[-2000:]}")


KEPT = Kept.open(HERE / "kept.jsonl")


def timing(script: str, *arguments: object) -> Timing:
    answer = KEPT.answer(script, *arguments)
    seconds = answer["seconds"]
    rate = None
    if "examples" in answer:
        rate = statistics.median(n / s for n, s in zip(answer["examples"], seconds, strict=True))
    found = Timing(
        answer["peer"], answer["configuration"], statistics.median(seconds), rate, len(seconds)
    )
    print(f"    {found.seconds * 1e3:,.2f} ms  {found.peer}, {found.configuration}", flush=True)
    return found


def best(timings: list[Timing]) -> Timing:
    return min(timings, key=lambda t: t.seconds if t.rate is None else 1 / t.rate)


def sgemm(threads: int) -> float:
    """The best of a few large float32 products, in Gflop/s."""
    torch.set_num_threads(threads)
    a, best_seconds = torch.randn(2048, 2048), float("inf")
    for _ in range(8):
        began = time.perf_counter()
        torch.mm(a, a)
        best_seconds = min(best_seconds, time.perf_counter() - began)
    return 2 * 2048**3 / best_seconds / 1e9


def against_peers(quick: bool, only: frozenset[str]) -> Found:
    """Per item the timings of fedveil and of every peer, in the order in which they were taken."""
    few, many = (2, 10) if quick else (4, 50)
    found: Found = {}
    for item, rounds, flower in (
        ("a-1", 4 * many, 2),
        ("a-10", 2 * many, 2),
        ("b", few, few),
        ("c-1", many // 2, few),
        ("c-5", many // 2, few),
    ):
        if item not in only:
            continue
        calls: dict[str, list[Call]] = {
            "fedveil": [("ours.py", item, "--rounds", rounds)],
            "pfl": [
                ("peers/pfl_research.py", item, "--rounds", few, "--processes", n) for n in (1, 2)
            ],
            "flower": [("peers/flower_simulator.py", item, "--rounds", flower)],
        }
        found[item] = in_turns(2, calls)
    if "b" in only:
        found["b"]["bare loop"] = [
            timing("peers/bare_loop.py", "b", "--rounds", few),
            timing("peers/bare_loop.py", "b", "--rounds", few, "--batch", 32, "--keep-memory"),
        ]
    if "d" in only:
        found["d"] = {
            "fedveil": [timing("ours.py", "d", "--rounds", 2 * few)],
            "opacus": [found for _, found in opacus("d", few)],
        }
    if "e" in only:
        found["e"] = {
            "fedveil": [timing("ours.py", "e", "--rounds", few)],
            "pfl": [timing("peers/pfl_noise.py", "--rounds", few)],
        }
    for item in (item for item in MODULES if item in only):
        found[item] = modules(item, 2)
    if "i" in only:
        found["i"] = in_turns(
            2,
            {
                "fedveil": [("ours.py", "i", "--rounds", 10)],
                "seeded, one by one": [
                    ("ours.py", "i", "--rounds", 10, "--seeded", "--mode", "looped")
                ],
                "seeded": [("ours.py", "i", "--rounds", 10, "--seeded")],
            },
        )
    if "j" in only:
        call = ("ours.py", "j", "--rounds", 2 * few)
        found["j"] = in_turns(2, {"fedveil": [call], "honest round": [(*call, "--honest")]})
    for item, work, rounds in ((ON_RAY, "b", few), ("l", "l", 4 * many)):
        if item in only:
            call = ("ours.py", work, "--rounds", rounds)
            calls = {"fedveil": [(*call, "--ray")], LOCAL: [(*call, "--workers", 2)]}
            found[item] = in_turns(2, calls)
    if "k" in only:
        loop = ("peers/plain_loop.py", "k", "--rounds", 2 * few)
        found["k"] = in_turns(
            2,
            {
                "fedveil": [("ours.py", "k", "--rounds", 2 * few)],
                "plain loop": [loop, (*loop, "--threads", 1)],
            },
        )
    return found


def opacus(item: str, rounds: int) -> list[tuple[Call, Timing]]:
    """Every configuration of Opacus that runs on this item, with what it took.

    Of larger modules, which take long, those that keep memory, as the bare loop beside them does.
    """
    found = []
    for configuration in OPACUS:
        if LAST in configuration and len(WORK[item].shape) != 3:
            continue
        if item in MODULES and KEEP not in configuration:
            continue
        call = ("peers/opacus_dp_sgd.py", item, "--rounds", rounds, *configuration)
        try:
            found.append((call, timing(*call)))
        except Failed as error:
            print(f"    default: {error}", flush=True)
    if not found:
        raise Failed(f"Opacus runs ({item}) in none of its configurations")
    return found


def modules(item: str, turns: int) -> dict[str, list[Timing]]:
    """fedveil, the bare loop, and where it is DP-SGD Opacus as fast as it gets, in turns."""
    loop = ("peers/bare_loop.py", item, "--rounds", 2)
    layouts = ((), ("--contiguous",)) if len(WORK[item].shape) == 3 else ((),)
    calls: dict[str, list[Call]] = {
        "fedveil": [("ours.py", item, "--rounds", 2)],
        "bare loop": [(*loop, *layout, KEEP) for layout in layouts],
    }
    others: list[Timing] = []
    if WORK[item].batch:
        tried = opacus(item, 2)
        fastest = best([found for _, found in tried])
        calls["opacus"] = [call for call, found in tried if found is fastest]
        others = [found for _, found in tried if found is not fastest]
    found = in_turns(turns, calls)
    if others:
        found["opacus"] += others
    return found


def in_turns(turns: int, calls: dict[str, list[Call]]) -> dict[str, list[Timing]]:
    """The best of several turns of every call: they are noisy, and take long."""
    found: dict[str, list[list[Timing]]] = {who: [[] for _ in each] for who, each in calls.items()}
    for _ in range(turns):
        for who, each in calls.items():
            for place, call in zip(found[who], each, strict=True):
                place.append(timing(*call))
    return {who: [best(place) for place in places] for who, places in found.items()}


LAST, KEEP = "--channels-last", "--keep-memory"
OPACUS = (
    ("--processes", 1, "--mode", "hooks"),
    ("--processes", 2, "--mode", "hooks"),
    ("--processes", 2, "--mode", "hooks", LAST),
    ("--processes", 2, "--mode", "hooks", KEEP),
    ("--processes", 2, "--mode", "functorch"),
    ("--processes", 2, "--mode", "functorch", KEEP),
    ("--processes", 2, "--mode", "ew"),
    ("--processes", 1, "--mode", "ghost"),
    ("--processes", 2, "--mode", "ghost"),
    ("--processes", 2, "--mode", "ghost", LAST),
    ("--processes", 2, "--mode", "ghost", KEEP),
    ("--processes", 2, "--mode", "ghost", LAST, KEEP),
)
MODULES = tuple(item for item in WORK if item[0] in "fgh")
ON_RAY, LOCAL = "b-ray", "two local workers"
ITEMS = (*WORK, "e", "i", ON_RAY)


@dataclass(frozen=True)
class Target:
    """A ratio that must be reached: how many times faster than the peer's best configuration."""

    item: str
    peer: str
    least: float


TARGETS = (
    Target("a-1", "flower", 5_000),
    Target("a-10", "flower", 5_000),
    Target("a-1", "pfl", 100),
    Target("a-10", "pfl", 100),
    Target("b", "pfl", 1.6),
    Target("b", "flower", 1.8),
    Target("b", "bare loop", 0.9),
    Target("c-1", "pfl", 5),
    Target("c-5", "pfl", 5),
    Target("d", "opacus", 2.5),
    *(Target(item, "bare loop", 1.2 if WORK[item].batch else 0.9) for item in MODULES),
    *(Target(item, "opacus", 1.2) for item in MODULES if WORK[item].batch),
    Target("i", "seeded, one by one", 0.5),
    Target("i", "seeded", 0.5),
    Target("j", "honest round", round(1 / 1.3, 2)),
    Target("k", "plain loop", 1.5),
    Target(ON_RAY, LOCAL, 0.87),
)


def compared(found: Found, target: Target) -> Timing:
    """The peer's best configuration; in (b) the bare loop's with whole batches."""
    theirs = found[target.item][target.peer]
    return theirs[0] if (target.item, target.peer) == ("b", "bare loop") else best(theirs)


def measured_targets(found: Found) -> list[Target]:
    return [target for target in TARGETS if target.item in found]


def ratio(found: Found, target: Target) -> float:
    """How many times faster fedveil is."""
    ours, other = found[target.item]["fedveil"][0], compared(found, target)
    if ours.rate is not None and other.rate is not None:
        return ours.rate / other.rate
    return other.seconds / ours.seconds


def growth(curve: str, values: tuple[int, ...]) -> list[dict[str, Any]]:
    points = [KEPT.answer("growth.py", curve, value) for value in values]
    for point in points:
        print(f"    {point['seconds'] * 1e3:,.2f} ms  {curve} {point['value']:,}", flush=True)
    return points


def doublings(points: list[dict[str, Any]]) -> list[float]:
    """How the time grows from each point to the next."""
    return [b["seconds"] / a["seconds"] for a, b in itertools.pairwise(points)]


def grown() -> dict[str, list[dict[str, Any]]]:
    return {
        "cohort": growth("cohort", COHORTS),
        "clients": growth("clients", CLIENTS),
        "clients-10000": growth("clients-10000", CLIENTS[2:]),
        "parameters": growth("parameters", PARAMETERS),
        "large": growth("large", (100,)),
    }


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    return (
        f"{platform.machine()}, {cores} cores, {platform.system()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}; sgemm peak "
        f"{sgemm(1):,.0f} Gflop/s on one thread, {sgemm(2):,.0f} on two"
    )


def ratio_table(found: Found) -> list[str]:
    lines = [
        "| work | against | fedveil | peer | ratio | wanted | |",
        "|---|---|---|---|---|---|---|",
    ]
    for target in measured_targets(found):
        ours, other = found[target.item]["fedveil"][0], compared(found, target)
        reached = ratio(found, target)
        by_rate = ours.rate is not None and other.rate is not None
        lines.append(
            f"| ({target.item}) | {target.peer} "
            f"| {shown(ours, by_rate)} | {shown(other, by_rate)} "
            f"| **{reached:,.4g} x** | {target.least:,} x | {verdict(reached >= target.least)} |"
        )
    if "l" in found:
        ours, other = found["l"]["fedveil"][0], found["l"][LOCAL][0]
        chunk = (ours.seconds - other.seconds) / WORK["l"].cohort
        both = f"{shown(ours, False)} | {shown(other, False)}"
        lines.append(f"| (l) | {LOCAL} | {both} | **{chunk * 1e3:.2f} ms more per chunk** | | |")
    if "e" not in found:
        return lines
    ours, other = found["e"]["fedveil"][0], best(found["e"]["pfl"])
    times = other.seconds / ours.seconds
    both = f"{shown(ours, False)} | {shown(other, False)}"
    lines.append(f"| (e) | pfl | {both} | **{times:,.4g} x** | | |")
    return lines


def shown(timing: Timing, by_rate: bool) -> str:
    if by_rate:
        return f"{timing.rate:,.0f} /s"
    return f"{timing.seconds * 1e3:,.2f} ms"


def verdict(reached: bool) -> str:
    return "reached" if reached else "**not reached**"


def all_timings(found: Found) -> list[str]:
    lines = [
        "| work | who | configuration | median of a whole round | examples/s |",
        "|---|---|---|---|---|",
    ]
    for item, peers in found.items():
        for timing in (t for timings in peers.values() for t in timings):
            rate = "" if timing.rate is None else f"{timing.rate:,.0f}"
            lines.append(
                f"| ({item}) | {timing.peer} | {timing.configuration} | "
                f"{timing.seconds * 1e3:,.2f} ms ({timing.rounds} rounds) | {rate} |"
            )
    return lines


def growth_tables(curves: dict[str, list[dict[str, Any]]]) -> list[str]:
    cohort, clients, many = curves["cohort"], curves["clients"], curves["clients-10000"]
    lines = ["", "Cohort (two-layer CNN of 21,840 parameters, 10 images a client, one step):", ""]
    lines += ["| cohort | ms per round | times the one before |", "|---|---|---|"]
    for point, times in zip(cohort, ["", *(f"{t:.2f}" for t in doublings(cohort))], strict=True):
        lines.append(f"| {point['value']:,} | {point['seconds'] * 1e3:,.1f} | {times} |")
    straight = all(1.6 <= t <= 2.4 for t in doublings(cohort))
    lines += ["", f"Every doubling doubles the time to 20 %: {verdict(straight)}."]
    lines += ["", "Clients (regression of 11 parameters, 10 records a client, memory-mapped):", ""]
    lines += ["| clients | cohort | ms per round | peak MiB |", "|---|---|---|---|"]
    for size, points in ((100, clients), (10_000, many)):
        for point in points:
            lines.append(
                f"| {point['value']:,} | {size:,} | {point['seconds'] * 1e3:,.2f} | "
                f"{point['peak_mib']:,.0f} |"
            )
    for size, points in ((100, clients[2:]), (10_000, many)):
        times = points[-1]["seconds"] / points[0]["seconds"]
        lines += [
            "",
            f"10^6 clients cost {times:.2f} times a round of 10^4, cohort {size:,} "
            f"(wanted 0.8 to 1.2): {verdict(0.8 <= times <= 1.2)}.",
        ]
    lines += ["", "Parameters (MLP 8-h-2, 20 clients of 10 records, one step):", ""]
    lines += ["| parameters | ms per round | peak MiB | worker's peak MiB |", "|---|---|---|---|"]
    for point in curves["parameters"]:
        lines.append(
            f"| {point['parameters']:,} | {point['seconds'] * 1e3:,.2f} | "
            f"{point['peak_mib']:,.0f} | {point['worker_mib']:,.0f} |"
        )
    large = curves["large"][0]
    lines += [
        "",
        f"A model of {large['parameters']:,} parameters, 100 clients per round of two steps: "
        f"{large['seconds']:.1f} s, {large['buffers']:.2f} model-sized buffers per worker beside "
        f"the data (wanted at most 6): {verdict(large['buffers'] <= 6)}.",
    ]
    return lines


def grid_lines() -> list[str]:
    answer = KEPT.answer("fu_grid.py")
    return [
        f"6 values of E, 4 of epsilon, 20 repetitions, T = 120 local iterations (120 / E rounds), "
        f"5,000 clients: {answer['trainings']} trainings, {answer['rounds']:,} rounds in "
        f"{answer['seconds']:.0f} s (wanted under 300): {verdict(answer['seconds'] < 300)}."
    ]


def profiles(found: Found) -> list[str]:
    """Where the time goes in each work item that missed a target."""
    targets = [t for t in measured_targets(found) if t.item in WORK]
    missed = {t.item for t in targets if ratio(found, t) < t.least}
    lines = []
    for item in sorted(missed):
        answer = KEPT.answer("ours.py", item, "--rounds", 20, "--profile")
        lines += ["", f"({item}), in one process:", "", "```", *answer["profile"], "```"]
    return lines


def growth_report(curves: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "# How fedveil grows",
        "",
        "Written by `make bench-growth`: one run, one machine.",
        "",
        machine(),
        *growth_tables(curves),
        *("", "## Fu's Fig. 5 grid", "", *grid_lines()),
    ]
    return "\n".join(lines) + "\n"


def report(found: Found) -> str:
    titles = [f"- ({item}) {WORK[item].title}" for item in WORK]
    titles.append(
        "- (e) clipping 10 updates of 10 million parameters, their sum, Gaussian noise on it"
    )
    titles.append(
        "- (i) a round of 10^6 clients that join with probability 1e-4 each, with secure noise"
    )
    titles.append(f"- ({ON_RAY}) the work of (b) on two workers of Ray; (l) as well")
    sections = [
        [
            "# Benchmarks",
            "",
            "Written by `make bench`: one run, one machine, everybody on the same cores.",
            "",
        ],
        [machine(), ""],
        titles,
        [
            "",
            "Median of whole rounds after warm-up. fedveil's rounds include sampling, the durable",
        ],
        ["charge, noise and clips; the peers' have no noise but in (d) and (e). A peer's best"],
        [
            "configuration counts; the bare loop runs each client's whole batch, as the peers do.",
            "But in (d) and (e) all take two turns, and the better turn of each counts.",
            "",
        ],
        ["## Ratios", "", *ratio_table(found)],
        ["", "## Every configuration", "", *all_timings(found)],
    ]
    where = profiles(found)
    if where:
        sections.append(["", "## Where the time goes where a ratio was missed", *where])
    if NOTES.exists():
        sections.append(["", NOTES.read_text().rstrip()])
    return "\n".join(line for section in sections for line in section) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a look")
    parser.add_argument("--only", help="some items, as in f-loop,f-dp: a table, and no file")
    parser.add_argument("--growth", action="store_true", help="growth alone: GROWTH.md")
    options = parser.parse_args()
    if options.only:
        only = frozenset(options.only.split(","))
        if not only <= set(ITEMS):
            parser.error(f"--only {options.only}: the items are {', '.join(ITEMS)}")
        found = against_peers(options.quick, only)
        print("\n".join([*ratio_table(found), "", *all_timings(found)]))
        return
    if options.growth:
        path, text = GROWTH, growth_report(grown())
    else:
        path, text = RESULTS, report(against_peers(options.quick, frozenset(ITEMS)))
    path.write_text(text)
    KEPT.path.unlink()
    print(text)


if __name__ == "__main__":
    main()
