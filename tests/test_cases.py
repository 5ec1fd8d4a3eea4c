"""The list of tests of which `make test` runs some cases."""

import re
from pathlib import Path

import pytest

from tests.conftest import ONE_IN

ROOT = Path(__file__).parents[1]


def test_every_test_of_the_list_exists():
    for file, tests in ONE_IN.items():
        found = set(re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE))
        assert tests.keys() <= found, file


def test_every_test_of_the_list_has_a_quick_case(request):
    """In a run of the whole suite, which alone collects them all."""
    config = request.config
    if config.option.keyword or config.args != config.getini("testpaths"):
        pytest.skip("the whole suite is needed")
    quick = {
        (item.nodeid.split("::")[0], getattr(item, "originalname", None))
        for item in request.session.items
        if item.get_closest_marker("slow") is None
    }
    missing = {(file, name) for file, tests in ONE_IN.items() for name in tests} - quick
    assert not missing
