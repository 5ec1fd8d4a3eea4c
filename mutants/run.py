"""`make mutants`: plant the bugs of the list, one after the other, and see whether a test fails.

First all tests run without a bug, which must pass and tells how long they take. Then each bug is
planted in a copy of the package, and the tests that should notice run first. A test that fails, or
does not end, has caught it. A bug that no test notices is an error, unless its entry says why none
can. A list that does not fit the source is an error before anything runs.

`make mutants-generated` draws mutants from the syntax tree instead (`--generate N`), runs the tests
of their package that are named after the file or import it, and prints the survivors, which are
questions and not errors. Test files that fail without a bug are left out.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fork import SLOW, Child, Copy, start, warm
from generate import Generated, generated, sample
from planted import Mutant, Project, Stale, check, read
from stages import stages_of

_PAUSE = 0.05
_PACKAGES = ("privacy", "training", "data", "models")
_NEAR = 2

Bug = Mutant | Generated


def main() -> int:
    """The command."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    project = Project(options.root.resolve())
    if options.generate:
        options.stages = options.stages or _NEAR
        every = [m for m in generated(project, _PACKAGES) if options.file in (None, m.file)]
        mutants: list[Bug] = [*sample(project, every, options.generate, options.seed)]
        print(f"{len(mutants)} of {len(every)} mutants of {', '.join(_PACKAGES)}")
    else:
        try:
            listed = read(project)
            wrong = check(project, listed)
        except Stale as e:
            wrong = [str(e)]
        if wrong:
            print(*wrong, f"{len(wrong)} of the list are stale: write them again", sep="\n")
            return 2
        mutants = [*listed]
        print(f"{len(mutants)} bugs fit the source")
    chosen = _chosen(mutants, options)
    if options.check or not chosen:
        return 0
    warm(project)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Copy(project, Path(folder) / str(n)) for n in range(options.jobs)]
        stages = {m.file: stages_of(project, m.file)[: options.stages] for m in chosen}
        stages = {file: [stage for stage in of if stage] for file, of in stages.items()}
        files = sorted({test for of in stages.values() for stage in of for test in stage})
        times, failing = ({}, []) if options.trust else _unchanged(project, copies, files)
        if failing and not options.generate:
            return 2
        for file, of in stages.items():
            kept = [[test for test in stage if test not in failing] for stage in of]
            stages[file] = [stage for stage in kept if stage]
        outcomes = dict(_tried(project, copies, chosen, stages, times))
    survived = _summary(chosen, outcomes)
    if survived:
        errors = "errors: each must be caught, or say why none can"
        print(f"survivors are {'questions' if options.generate else errors}")
    return 0 if options.generate else survived


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only see that the list fits")
    parser.add_argument("--only", nargs="+", default=[], metavar="ID", help="these bugs")
    parser.add_argument("--file", help="bugs in this file, such as privacy/plan.py")
    parser.add_argument("--trust", action="store_true", help="that tests pass without a bug")
    parser.add_argument("--stages", type=int, help="1: only tests that mirror the file, and so on")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--generate", type=int, metavar="N", help="N mutants, not of the list")
    parser.add_argument("--sample", type=int, help="so many of them, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    here = Path(__file__).parents[1]
    parser.add_argument("--root", type=Path, default=here, help="of the repository")
    return parser.parse_args()


def _chosen(mutants: list[Bug], options: argparse.Namespace) -> list[Bug]:
    unknown = set(options.only) - {m.id for m in mutants}
    if unknown:
        sys.exit(f"--only {', '.join(sorted(unknown))}: not in the list")
    found = [m for m in mutants if not options.only or m.id in options.only]
    found = [m for m in found if options.file in (None, m.file)]
    if options.sample is not None:
        drawn = random.Random(options.seed).sample(found, min(options.sample, len(found)))
        found = sorted(drawn, key=found.index)
    return found


def _unchanged(
    project: Project, copies: list[Copy], files: list[Path]
) -> tuple[dict[Path, float], list[Path]]:
    """How long each test file takes without a bug, and those that fail."""
    print(f"{len(files)} test files without a bug ...", flush=True)
    times: dict[Path, float] = {}
    failing = []
    jobs = [_Job(None, [[file]]) for file in files]
    for job, child, failed in _all(project, copies, jobs, {}):
        seconds = child.seconds
        times[job.stages[0][0]] = seconds
        if failed:
            failing.append(job.stages[0][0])
            print(*(copy.log for copy in copies), f"{failed} fails without a bug", sep="\n")
    print(f"... {'end' if failing else 'pass'}, in {sum(times.values()):.0f} s of computing")
    return times, failing


def _tried(
    project: Project,
    copies: list[Copy],
    mutants: list[Bug],
    stages: dict[str, list[list[Path]]],
    times: dict[Path, float],
) -> Iterator[tuple[str, str]]:
    """(id, the test that caught it or "") of each bug.

    A slow test that fails without a bug as well has caught nothing.
    """
    began = time.monotonic()
    by_slow: dict[str, str] = {}
    jobs = [
        _Job(
            m,
            _quick_first(stages[m.file], times),
            slow=isinstance(m, Mutant) and not m.equivalent,
        )
        for m in mutants
    ]
    for number, (job, child, failed) in enumerate(_all(project, copies, jobs, times), 1):
        mutant, seconds = job.mutant, child.seconds
        if mutant is None:
            raise AssertionError("only bugs are tried")
        left = (time.monotonic() - began) / number * (len(mutants) - number)
        told = f"caught by {failed}" if failed else "SURVIVED"
        print(
            f"[{number}/{len(mutants)}, {left / 60:.0f} min left] {mutant.id} in {mutant.file}: "
            f"{told} ({seconds:.0f} s)",
            flush=True,
        )
        if child.marks == SLOW:
            by_slow[mutant.id] = failed
        else:
            yield mutant.id, failed
    whole = [_Job(None, [[Path(test)]], slow=True) for test in sorted(set(by_slow.values()))]
    failing = {
        str(job.stages[0][0]) for job, _, failed in _all(project, copies, whole, {}) if failed
    }
    for test in sorted(failing):
        print(f"{test} fails without a bug")
    for name, test in by_slow.items():
        yield name, "" if test in failing else test


def _quick_first(stages: list[list[Path]], times: dict[Path, float]) -> list[list[Path]]:
    """Each stage after the first with its quickest files first."""
    return [*stages[:1], *(sorted(stage, key=lambda t: times.get(t, 0.0)) for stage in stages[1:])]


@dataclass(frozen=True)
class _Job:
    """Tests to be run on the package with a bug in it, or without.

    With `slow`, slow tests run after the quick ones.
    """

    mutant: Bug | None
    stages: list[list[Path]]
    slow: bool = False


def _all(
    project: Project, copies: list[Copy], jobs: list[_Job], times: dict[Path, float]
) -> Iterator[tuple[_Job, Child, str]]:
    """Run all jobs, one on each copy at a time: (job, its child, the test that failed or "")."""
    waiting, free = list(reversed(jobs)), list(copies)
    running: list[tuple[_Job, Child, Copy]] = []
    try:
        while waiting or running:
            while waiting and free:
                job, copy = waiting.pop(), free.pop()
                copy.plant(job.mutant)
                child = start(project, copy, job.stages, times, slow=job.slow)
                running.append((job, child, copy))
            time.sleep(_PAUSE)
            for entry in list(running):
                job, child, copy = entry
                failed = child.poll()
                if failed is not None:
                    running.remove(entry)
                    free.append(copy)
                    yield job, child, failed
    finally:
        for _, child, _ in running:
            child.kill()


def _summary(mutants: list[Bug], outcomes: dict[str, str]) -> int:
    """Print what was caught by package, and what was not; 1 if a bug survived without a reason."""
    counted = [m for m in mutants if not m.equivalent]
    caught = [m for m in counted if outcomes[m.id]]
    per_package = Counter(m.file.split("/")[0] for m in counted)
    caught_there = Counter(m.file.split("/")[0] for m in caught)
    print("\npackage       planted  caught")
    for package, count in sorted(per_package.items()):
        print(f"{package:12} {count:8} {caught_there[package]:7}")
    survivors = [m for m in counted if not outcomes[m.id]]
    for mutant in survivors:
        print(f"survived: {mutant.id} ({mutant.file}): {mutant.why}")
    for mutant in mutants:
        if mutant.equivalent and outcomes[mutant.id]:
            print(f"caught by {outcomes[mutant.id]}: {mutant.id} needs no reason to survive")
        elif mutant.equivalent:
            print(f"may survive: {mutant.id} ({mutant.file}): {mutant.equivalent}")
    print(f"{len(caught)} of {len(counted)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
