"""The harness that plants bugs: what it refuses, and that it tells caught from survived."""

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


@pytest.mark.slow
def test_tells_caught_from_survived(fake):
    done = run("--root", fake, "--jobs", 1)
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "half-noise in privacy/numbers.py: caught by tests/privacy/test_numbers.py::test_noise"
        in done.stdout
    )
    assert "process-dies in privacy/numbers.py: caught by" in done.stdout
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


SLOW_TESTS = """import pytest
from fake.privacy.numbers import unused

@pytest.mark.slow
def test_unused():
    assert unused(3) == {expected}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("expected", "words"), [(3, "1 of 1 caught"), (4, "0 of 1 caught")])
def test_slow_tests_are_tried_if_no_quick_one_notices(fake, expected, words):
    """One that fails without a bug has caught nothing."""
    (fake / "tests" / "privacy" / "test_numbers_slow.py").write_text(
        TESTS + SLOW_TESTS.format(expected=expected)
    )
    done = run("--root", fake, "--jobs", 1, "--only", "nobody-looks")
    assert words in done.stdout, done.stdout + done.stderr
    assert done.returncode == (expected != 3)
    assert ("test_unused fails without a bug" in done.stdout) == (expected != 3)


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


@pytest.fixture
def generate(planted):
    return importlib.import_module("generate")


def test_generated_mutants_change_one_thing_each(fake, planted, generate):
    project = planted.Project(fake)
    numbers = fake / "src" / "fake" / "privacy" / "numbers.py"
    numbers.write_text(
        "def f(a, b: int = 2):\n"
        '    """Not 1."""\n'
        "    if a < b and not b:\n"
        "        raise ValueError(f'{a + 1}')\n"
        "    print(a)\n"
        "    return (a) * 2.5 - b\n"
    )
    mutants = generate.generated(project, ["privacy"])
    changes = {(m.old.strip(" ()"), m.new.strip(" ()")) for m in mutants}
    assert changes == {
        ("<", "<="),
        ("and", "or"),
        ("a < b and not b", "not (a < b and not b"),
        ("not b", "b"),
        ("raise ValueError(f'{a + 1}'", "pass"),
        ("print(a", "pass"),
        ("*", "/"),
        ("2.5", "5.0"),
        ("-", "+"),
        ("2", "3"),
    }
    drawn = generate.sample(project, mutants, 4, seed=1)
    assert len(drawn) == 4
    assert drawn == generate.sample(project, mutants, 4, seed=1)


@pytest.mark.slow
def test_survivors_of_generated_mutants_are_printed_and_no_error(fake):
    numbers = fake / "src" / "fake" / "privacy" / "numbers.py"
    numbers.write_text(SOURCE.replace("    return value\n", "    return value + 1\n"))
    done = run("--root", fake, "--generate", 99, "--jobs", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    for old, new in (("+", "-"), ("1", "2")):
        assert f"(privacy/numbers.py): `{old}` becomes `{new}` in: return value + 1" in done.stdout
    assert "`*` becomes `/`" not in done.stdout
