"""The list of tests of which `make test` runs some cases."""

import re
from pathlib import Path

from tests.conftest import ONE_IN

ROOT = Path(__file__).parents[1]


def test_every_test_of_the_list_exists():
    for file, tests in ONE_IN.items():
        found = set(re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE))
        assert tests.keys() <= found, file
