"""Pages in a real browser, where there is one: `make browser` installs it."""

import pytest

from .driver import AXE, CHROMIUM, DRIVER, opened_browser


@pytest.fixture(scope="session")
def browser():
    missing = [
        name
        for name, there in (
            ("chromium", CHROMIUM),
            ("chromedriver", DRIVER),
            ("axe-core", AXE.exists()),
        )
        if not there
    ]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: make browser")
    with opened_browser() as found:
        yield found
