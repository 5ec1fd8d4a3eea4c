"""Prints rates, and each one's ratio to a plain fill of the same memory."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    session = getattr(terminalreporter.config, "_benchmarksession", None)
    rates = {b.name: b.extra_info.get("million_per_second") for b in session.benchmarks if b.stats}
    fill = next((rate for name, rate in rates.items() if "_fill" in name), None)
    for name, rate in rates.items():
        if rate and fill:
            text = f"{name}: {rate:,.0f} million coordinates/s, 1/{fill / rate:,.0f} of a fill"
            terminalreporter.write_line(text)
