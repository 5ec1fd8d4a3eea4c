"""The section of a run's report that shows the results of its audit."""

import json
import math
from decimal import ROUND_FLOOR
from pathlib import Path
from typing import Any

from fedveil.audit.audit_cache import ABOUT, FOUND, audited_digest
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import PrivacyClaim, rendered
from fedveil.runs.recipe import recipe_in
from fedveil.web.html import Content, Markup, number_text, tag
from fedveil.web.layout import listed, section, table

_HOLDS = (
    "No claim is violated. A lower bound below a claim does not prove the claim: what an attack "
    "does not find, a better one may."
)
_LIKELIEST = "The likeliest epsilon is an estimate without confidence: it refutes no claim."
_VIOLATED = "A claim is violated: more is released than is claimed."


def audit_section(audit: Path, run: Path) -> Markup:
    """The tables of an audit: each claim beside what attacks found.

    | edge | behaviour |
    |---|---|
    | no audit in the directory, or one that has not ended | BadInput |
    | an audit of another recipe | BadInput |
    | texts with markup in the results | shown as text |
    """
    about, results = _read(audit / ABOUT), _read(audit / FOUND)
    if about.get("recipe") != audited_digest(recipe_in(run)):
        raise BadInput(f"--audit {audit} is of another recipe than {run}: name an audit of it")
    try:
        findings = [_finding(one) for one in results["findings"]]
        leaks = [_leak(one) for one in results["leaks"]]
        left_out = [str(one) for one in results["left_out"]]
        violated = bool(results["violated"])
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise BadInput(f"{audit / FOUND} cannot be read: {e}") from e
    content: list[Content] = []
    if findings:
        verdict = tag("p", _VIOLATED, class_="warn") if violated else tag("p", _HOLDS)
        content += [verdict, table(findings, "Claimed beside empirical", wide=True)]
        if any(one["likeliest epsilon"] for one in findings):
            content.append(tag("p", _LIKELIEST, class_="note"))
    if leaks:
        content.append(table(leaks, "What attacks learn, intervals at 95 %", wide=True))
    if left_out:
        content += [tag("h3", "Left out"), listed(left_out)]
    return section("Attacks on this run", *content, id="audit")


def _finding(one: dict[str, Any]) -> dict[str, Content]:
    lower, estimate = float(one["lower_bound"]), one["estimate"]
    return {
        "attack": str(one["attack"]),
        "about": str(one["what"]),
        "claimed": PrivacyClaim.from_dict(one["claim"]).short,
        "epsilon found, at least (95 %)": rendered(lower, ROUND_FLOOR),
        "likeliest epsilon": "" if estimate is None else rendered(float(estimate), ROUND_FLOOR),
        "draws": int(one["draws"]),
        "the claim": str(one["verdict"]),
    }


def _leak(one: dict[str, Any]) -> dict[str, Content]:
    claim = one["claim"]
    return {
        "attack": str(one["attack"]),
        "about": str(one["what"]),
        "claimed": "nothing" if claim is None else PrivacyClaim.from_dict(claim).short,
        "found": "; ".join(f"{name} {_measure(m)}" for name, m in one["measures"].items()),
    }


def _measure(measure: dict[str, Any]) -> str:
    value, low, high = measure["value"], measure["low"], measure["high"]
    text = number_text(float("nan" if value is None else value))
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return text
    return f"{text} ({number_text(float(low))} to {number_text(float(high))})"


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError as e:
        raise BadInput(
            f"{path} is missing: name a directory that `fedveil audit RUN --out` has finished"
        ) from e
    except (OSError, ValueError, TypeError, RecursionError) as e:
        raise BadInput(f"{path} cannot be read: {e}") from e
