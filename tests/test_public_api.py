"""What `import fedveil` offers: every name of the stub, and nothing is loaded before it is used."""

import ast
import rlcompleter
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import fedveil

STUB = ast.parse(Path(fedveil.__file__).with_suffix(".pyi").read_text())
HOMES = {
    alias.asname or alias.name: (node.module, alias.name)
    for node in STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
MODULES = [name for name in HOMES if isinstance(getattr(fedveil, name), ModuleType)]
INSIDE = [(module, name) for module in MODULES for name in getattr(fedveil, module).__all__]


def test_the_stub_lists_what_it_imports():
    (listed,) = [ast.literal_eval(n.value) for n in STUB.body if isinstance(n, ast.Assign)]
    assert listed == sorted(HOMES) == fedveil.__all__
    assert len(listed) <= 40


@pytest.mark.parametrize("name", HOMES)
def test_public_names_are_where_the_stub_says(name):
    found, (module, attribute) = getattr(fedveil, name), HOMES[name]
    assert getattr(sys.modules[module], attribute) is found
    assert name in dir(fedveil)
    assert (found.__doc__ or "").strip()


@pytest.mark.parametrize(("module", "name"), INSIDE)
def test_public_names_of_modules_are_there_and_say_what_they_are(module, name):
    assert (getattr(getattr(fedveil, module), name).__doc__ or "").strip()


def test_every_public_name_has_one_place():
    names = [name for _, name in INSIDE]
    assert len(names) == len(set(names))
    assert not set(names) & set(HOMES)
    for module in MODULES:
        listed = getattr(fedveil, module).__all__
        assert listed == sorted(listed)


IMPORT_EACH_FIRST = """
import os, sys, torch
for module in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(f"from fedveil import {module}; import fedveil; assert fedveil.{module} is {module}")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, module
"""


@pytest.mark.slow
def test_modules_are_imported_from_the_top_in_any_order():
    subprocess.run([sys.executable, "-c", IMPORT_EACH_FIRST, *MODULES], check=True)


def test_the_version_is_that_of_the_installed_package():
    assert fedveil.__version__ == version("fedveil")
    assert "__version__" in dir(fedveil)
    assert "__version__" not in fedveil.__all__
    declared = [node.target.id for node in STUB.body if isinstance(node, ast.AnnAssign)]
    assert declared == ["__version__"]


def test_public_names_are_completed():
    completer = rlcompleter.Completer({"fv": fedveil})
    found = {word.rstrip("()") for word in completer.attr_matches("fv.")}
    assert {f"fv.{name}" for name in fedveil.__all__} <= found
    only = {word.rstrip("()") for word in completer.attr_matches("fv.PrivacyC")}
    assert only == {"fv.PrivacyClaim"}


def test_unknown_names_are_no_attributes():
    with pytest.raises(AttributeError, match="has no attribute 'colour'"):
        _ = fedveil.colour


def test_the_package_is_imported_without_torch():
    code = (
        "import sys, fedveil\n"
        "fedveil.__version__, dir(fedveil)\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", "False"]


@pytest.mark.slow
def test_type_checkers_see_the_real_types(tmp_path):
    user = tmp_path / "user.py"
    user.write_text(
        "import fedveil as fv\n"
        "plan = fv.unprotected(fv.samplers.Everyone(), 3, rounds=1)\n"
        "claim: fv.PrivacyClaim | None = plan.promise\n"
        "reveal_type(fv.central)\n"
        "fv.clips.Fixed('one')\n"
    )
    told = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", tmp_path, user],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "PrivacyPlan" in told.stdout
    assert 'Argument 1 to "Fixed" has incompatible type "str"' in told.stdout
    assert told.stdout.count("error:") == 1
