"""The harness that plants bugs: its list fits the source, and it tells caught from survived."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HARNESS = ROOT / "mutants" / "run.py"

SOURCE = '''"""Two numbers."""


def clip(value):
    """At most one.

    >>> clip(3)
    1
    """
    return min(value, 1)


def noise(value):
    return 2 * value


def unused(value):
    return value
'''
TESTS = """from fake.privacy.numbers import noise


def test_noise():
    assert noise(2) == 4
"""
BUGS = """
[[mutant]]
id = "half-noise"
file = "privacy/numbers.py"
old = "return 2 * value"
new = "return value"
why = "half of the noise"

[[mutant]]
id = "nobody-looks"
file = "privacy/numbers.py"
old = '''
def unused(value):
    return value'''
new = '''
def unused(value):
    return -value'''
why = "no test looks at it"

[[mutant]]
id = "process-dies"
file = "privacy/numbers.py"
old = "return 2 * value"
new = "__import__('os')._exit(3)"
why = "the process of the tests dies"
"""
UNSEEN = """
[[mutant]]
id = "unseen"
file = "privacy/numbers.py"
old = "min(value, 1)"
new = "min(1, value)"
why = "the other way round"
equivalent = "a minimum has no order"
"""


@pytest.fixture
def fake(tmp_path):
    """A repository with a package of its own, two bugs that tests notice and one that none does."""
    package = tmp_path / "src" / "fake"
    (package / "privacy").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "privacy" / "__init__.py").write_text("")
    (package / "privacy" / "numbers.py").write_text(SOURCE)
    (tmp_path / "tests" / "privacy").mkdir(parents=True)
    (tmp_path / "tests" / "privacy" / "test_numbers.py").write_text(TESTS)
    (tmp_path / "mutants" / "list").mkdir(parents=True)
    (tmp_path / "mutants" / "list" / "privacy.toml").write_text(BUGS + UNSEEN)
    return tmp_path


def run(*arguments):
    command = [sys.executable, HARNESS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def planted(monkeypatch):
    monkeypatch.syspath_prepend(str(HARNESS.parent))
    return importlib.import_module("planted")


def test_the_list_fits_the_source(planted):
    mutants = planted.read(planted.Project(ROOT))
    assert planted.check(planted.Project(ROOT), mutants) == []
    assert len(mutants) >= 150
    packages = {"attacks", "audit", "data", "flower", "mixing", "models", "privacy", "runs"}
    packages |= {"training", "tuning", "papers", "watch", "web", "interrupts.py", "console.py"}
    assert packages <= {m.file.split("/")[0] for m in mutants}
    assert all(m.why for m in mutants)


def test_few_are_called_equivalent(planted):
    mutants = planted.read(planted.Project(ROOT))
    assert sum(bool(m.equivalent) for m in mutants) <= len(mutants) / 20


@pytest.mark.slow
def test_tells_caught_from_survived(fake):
    done = run("--root", fake, "--jobs", 1)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "half-noise: caught by tests/privacy/test_numbers.py::test_noise" in done.stdout
    assert "process-dies: caught by" in done.stdout
    assert "survived: nobody-looks (privacy/numbers.py): no test looks at it" in done.stdout
    assert "may survive: unseen (privacy/numbers.py): a minimum has no order" in done.stdout
    assert "2 of 3 caught" in done.stdout
    assert (fake / "src" / "fake" / "privacy" / "numbers.py").read_text() == SOURCE


@pytest.mark.slow
def test_all_caught_is_success(fake):
    done = run("--root", fake, "--jobs", 2, "--only", "half-noise", "process-dies", "unseen")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 caught" in done.stdout


@pytest.fixture
def harness(planted):
    return importlib.import_module("run")


def test_one_survivor_without_a_reason_is_an_error(harness, planted, capsys):
    """However many others are caught."""
    entry = {"file": "privacy/a.py", "old": "a", "new": "b", "why": "c"}
    mutants = [planted.Mutant(id=f"bug-{n}", **entry) for n in range(1000)]
    outcomes = {m.id: "tests/test_a.py" for m in mutants}
    assert harness._summary(mutants, outcomes) == 0
    outcomes["bug-7"] = ""
    assert harness._summary(mutants, outcomes) == 1
    assert "survived: bug-7 (privacy/a.py): c" in capsys.readouterr().out
    mutants[7] = planted.Mutant(id="bug-7", **entry, equivalent="nobody can see it")
    assert harness._summary(mutants, outcomes) == 0
    assert "may survive: bug-7 (privacy/a.py): nobody can see it" in capsys.readouterr().out
    outcomes["bug-7"] = "tests/test_b.py"
    assert harness._summary(mutants, outcomes) == 0
    assert "bug-7 needs no reason to survive" in capsys.readouterr().out


@pytest.mark.slow
def test_leaves_the_source_alone(fake):
    run("--root", fake, "--trust", "--only", "half-noise")
    assert (fake / "src" / "fake" / "privacy" / "numbers.py").read_text() == SOURCE


@pytest.mark.slow
def test_refuses_tests_that_fail_by_themselves(fake):
    (fake / "tests" / "privacy" / "test_numbers.py").write_text(TESTS.replace("== 4", "== 5"))
    done = run("--root", fake, "--jobs", 1)
    assert done.returncode == 2
    assert "test_noise fails without a bug" in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("return 2 * value", "return 3 * value", "half-noise: `old` occurs 0 times"),
        ("return 2 * value", "return 2 * value  # return 2 * value", "occurs 2 times"),
    ],
)
def test_refuses_a_list_that_does_not_fit(fake, planted, old, new, told):
    numbers = fake / "src" / "fake" / "privacy" / "numbers.py"
    numbers.write_text(numbers.read_text().replace(old, new))
    project = planted.Project(fake)
    assert any(told in line for line in planted.check(project, planted.read(project)))


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (BUGS, "ids occur twice: half-noise"),
        (UNSEEN.replace("min(1, value)", "min(1,"), "does not compile"),
        (UNSEEN.replace("min(1, value)", "min(value, 1)"), "changes nothing"),
        (UNSEEN.replace("why", "because"), "has the keys"),
    ],
)
def test_refuses_entries_that_say_nothing(fake, planted, entry, told):
    (fake / "mutants" / "list" / "more.toml").write_text(entry.replace('"unseen"', '"more"'))
    project = planted.Project(fake)
    try:
        found = planted.check(project, planted.read(project))
    except planted.Stale as e:
        found = [str(e)]
    assert len(found) == 1
    assert told in found[0]


def test_a_list_that_does_not_fit_is_an_error(fake):
    (fake / "mutants" / "list" / "more.toml").write_text(BUGS)
    done = run("--root", fake, "--check")
    assert done.returncode == 2
    assert "ids occur twice: half-noise" in done.stdout


def test_tests_that_should_notice_a_bug_exist(planted):
    stages = importlib.import_module("stages")
    named = {test for tests in stages._ALSO.values() for test in tests}
    assert [test for test in sorted(named) if not (ROOT / "tests" / test).is_file()] == []
