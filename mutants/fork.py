"""Running tests against a changed copy of the package, in a process forked from a warm one.

The parent has imported everything that package and tests need except the package itself. A child
puts its copy first on the path and runs pytest; what it imports is gone with it.
"""

import ast
import compileall
import ctypes
import importlib
import importlib.util
import json
import os
import py_compile
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from generate import Generated
from planted import Mutant, Project

LEAST_SECONDS = 60.0
QUICK, SLOW = "not slow", "slow"
"""Which tests run, as pytest's expressions of marks."""
_DIE_WITH_PARENT = 1
_LONGER, _UNKNOWN = 10, 3600.0


def warm(project: Project) -> None:
    """Import what package and tests import from elsewhere, so that children need not."""
    own = project.package.name
    names = {"pytest", "xdist", "pytest_timeout", "hypothesis"}
    for file in [*project.package.rglob("*.py"), *project.tests("**/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    installed = {name for name in names if name.split(".")[0] != own}
    for name in sorted(installed):
        if importlib.util.find_spec(name.split(".")[0]) is not None:
            importlib.import_module(name)
    if own in sys.modules:
        raise AssertionError(f"{own} was imported before a child could do so")


class Copy:
    """A copy of the package, in which one bug at a time is planted."""

    def __init__(self, project: Project, folder: Path) -> None:
        self._project, self.folder = project, folder
        self.package = folder / "src" / project.package.name
        shutil.copytree(project.package, self.package, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(
            self.package, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
        )

    def own(self, path: Path) -> Path:
        """A file of the package as it is here; any other as it is."""
        if not path.is_relative_to(self._project.package):
            return path
        return self.package / path.relative_to(self._project.package)

    @property
    def log(self) -> str:
        """The end of what the last tests said."""
        return (self.folder / "log.txt").read_text(errors="replace")[-4000:]

    def plant(self, mutant: Mutant | Generated | None) -> None:
        """Undo what was planted before, and plant this."""
        for file in self.package.rglob("*.py"):
            original = self._project.package / file.relative_to(self.package)
            if file.read_bytes() != original.read_bytes():
                file.write_bytes(original.read_bytes())
        if mutant is not None:
            target = self.package / mutant.file
            target.write_text(mutant.planted_in(target.read_text()))


@dataclass
class Child:
    """Tests on their way: `poll` tells what came of them.

    Once a test has failed, `marks` is SLOW if that was a slow one.
    """

    pid: int
    report: Path
    limits: list[float]
    began: float = field(default_factory=time.monotonic)
    marks: str = QUICK
    _stage: tuple[int, float] = field(init=False)

    def __post_init__(self) -> None:
        self._stage = (0, self.began)

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.began

    def poll(self) -> str | None:
        """None while it runs; then the test that failed, "" if none did."""
        pid, _ = os.waitpid(self.pid, os.WNOHANG)
        lines = self.report.read_text().splitlines() if self.report.exists() else []
        if pid:
            self._end_group()
            last = json.loads(lines[-1]) if lines else {}
            if "broken" in last:
                raise AssertionError(f"the harness failed in a child:\n{last['broken']}")
            self.marks = str(last.get("marks", QUICK))
            return str(last.get("failed", "the process died"))
        stage = sum("stage" in json.loads(line) for line in lines if line.endswith("}"))
        if stage != self._stage[0]:
            self._stage = (stage, time.monotonic())
        limit = self.limits[max(0, min(stage, len(self.limits)) - 1)]
        if time.monotonic() - self._stage[1] > limit:
            self.kill()
            return f"no end after {limit:.0f} s"
        return None

    def kill(self) -> None:
        """End it and everything it started."""
        self._end_group()
        os.waitpid(self.pid, 0)

    def _end_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def start(
    project: Project,
    copy: Copy,
    stages: Sequence[Sequence[Path]],
    times: dict[Path, float],
    *,
    slow: bool,
) -> Child:
    """Fork a child that runs the stages, one after the other, until a test fails.

    With `slow`, the stages begin again with their slow tests if no quick one fails. These have the
    time limits of their own.
    """
    report = copy.folder / "report.jsonl"
    report.unlink(missing_ok=True)
    limits = [_limit(stage, times) for stage in stages] + slow * len(stages) * [_UNKNOWN]
    pid = os.fork()
    if pid:
        return Child(pid, report, limits)
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _run(project, copy, stages, slow, report)
    except BaseException:
        report.write_text(json.dumps({"broken": traceback.format_exc()}) + "\n")
    finally:
        os._exit(0)


def _limit(tests: Sequence[Path], times: dict[Path, float]) -> float:
    """After how many seconds tests are said not to end."""
    if not times.keys() >= set(tests):
        return _UNKNOWN
    return max(LEAST_SECONDS, _LONGER * sum(times[test] for test in tests))


def _passes(stages: Sequence[Sequence[Path]], slow: bool) -> list[tuple[Sequence[Path], str]]:
    """(test files, which of their tests) in order: the quick ones, with `slow` then the others."""
    return [(stage, mark) for mark in (QUICK, SLOW)[: 1 + slow] for stage in stages]


def _run(
    project: Project, copy: Copy, stages: Sequence[Sequence[Path]], slow: bool, report: Path
) -> None:
    """The life of a child."""
    log = os.open(copy.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    source = str(copy.package.parent)
    sys.path.insert(0, source)
    os.environ |= {"PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    os.chdir(project.root)
    with report.open("a", buffering=1) as out:
        for number, (tests, chosen) in enumerate(_passes(stages, slow)):
            out.write(json.dumps({"stage": number}) + "\n")
            failed = _failed(project, copy, tests, chosen)
            if failed:
                out.write(json.dumps({"failed": failed, "marks": chosen}) + "\n")
                return
        _check_origin(project, copy)
        out.write(json.dumps({"failed": ""}) + "\n")


def _failed(project: Project, copy: Copy, tests: Sequence[Path], chosen: str) -> str:
    """The first test that fails, "" if none does. `chosen` is pytest's expression of marks."""
    watch = _Watch()
    arguments = ["-x", "-q", "-p", "no:randomly", "-m", chosen, "--tb=short"]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins are there already
    arguments += [f"--rootdir={project.root}", f"--basetemp={copy.folder / 'tmp'}"]
    if chosen == QUICK and importlib.util.find_spec("pytest_timeout") is not None:
        arguments.append(f"--timeout={LEAST_SECONDS:.0f}")
    here = [str(copy.own(test)) for test in tests]
    code = pytest.main([*arguments, *here], plugins=[watch])
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    return watch.failed or f"pytest ended with {code!r}"


def _check_origin(project: Project, copy: Copy) -> None:
    """Refuse to call a mutant survived if its tests saw another copy of the package."""
    module = importlib.import_module(project.package.name)
    if Path(str(module.__file__)).parent != copy.package:
        raise AssertionError(f"tests saw {module.__file__}, not the copy in {copy.package}")


class _Watch:
    """A pytest plugin that notes the first failure."""

    failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} (import)"
