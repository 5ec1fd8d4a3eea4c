"""The federation between network namespaces (namespaces.py), where they are to be had."""

import shutil
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.e2e.namespaces import demonstrate, obstacle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_parties_with_networks_users_and_files_of_their_own():
    reason = obstacle()
    if reason:
        pytest.skip(reason)
    base = Path(tempfile.mkdtemp(prefix="fedveil-"))  # pytest's own folders are closed to others
    assert "per person" in demonstrate(base)
    shutil.rmtree(base)
