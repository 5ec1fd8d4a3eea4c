"""The directory of a long audit, where an interrupted one resumes, and its section of a report.

audit.json   what is audited, with which settings, and by which code
found.json   all results, written when the audit has ended
NAME.npy     an array, written as soon as it is computed
NAME.json    plain values
NAME.png     a figure
"""

import hashlib
import importlib.metadata
import io
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import ROUND_FLOOR
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

import fedveil
from fedveil.base.errors import BadInput
from fedveil.data.data_files import UNREADABLE
from fedveil.pages.html import TEXTS, Content, Markup, bullet_list, section, table, tag, value_text
from fedveil.privacy.accounting.claims import PrivacyClaim, rendered
from fedveil.runs.recipe import Recipe, recipe_in
from fedveil.runs.run_directory import locked, write_atomic
from fedveil.tuning.figures import png
from fedveil.tuning.sweep import check_new_folder, make_folder

Numbers = npt.NDArray[np.float64]

_FORMAT = 2
_PACKAGES = ("fedveil", "torch", "numpy", "scipy", "scikit-learn")
ABOUT = "audit.json"
FOUND = "found.json"


@dataclass(frozen=True)
class AuditCache:
    """The directory of an audit, with arrays, values and figures by name.

    Everything in the directory is a function of audit.json, up to rounding. An audit that was
    killed and started again computes no array twice and ends with the same findings. The code is
    part of audit.json: arrays of another version are refused.

    Attributes:
        folder: The directory. None saves nothing and loads nothing.
    """

    folder: Path | None = None

    @staticmethod
    @contextmanager
    def locked_in(folder: Path | None, identity: dict[str, Any]) -> Iterator["AuditCache"]:
        """Context manager: open the audit in `folder`, or begin one there, under a lock.

        Yields the cache. The folder and its audit.json are written on entry.

        Args:
            folder: The directory. None yields a cache that saves nothing.
            identity: JSON values that the arrays depend on, beside the code.

        | edge | behaviour |
        |---|---|
        | another audit, a run, or other files in the folder | BadInput |
        | the same audit, begun by other code or other libraries | BadInput |
        | another process is at work there | BadInput |
        | a folder that cannot be made | BadInput |
        """
        if folder is None:
            yield AuditCache()
            return
        about = {"format": _FORMAT, "code": code(), **json.loads(json.dumps(identity))}
        _check(folder, about)
        make_folder(folder)
        with locked(folder):
            _check(folder, about)
            write_atomic(folder / ABOUT, json.dumps(about, indent=2).encode())
            yield AuditCache(folder)

    def load_array(self, name: str) -> Numbers | None:
        """Return the array of NAME.npy as float64. None without a directory or a readable file."""
        if self.folder is None:
            return None
        try:
            values = np.load(self.folder / f"{name}.npy", allow_pickle=False)
        except UNREADABLE:
            return None
        return np.asarray(values, dtype=np.float64)

    def save_array(self, name: str, values: Numbers) -> None:
        """Write an array to NAME.npy atomically. Do nothing without a directory."""
        if self.folder is not None:
            buffer = io.BytesIO()
            np.save(buffer, values, allow_pickle=False)
            write_atomic(self.folder / f"{name}.npy", buffer.getvalue())

    def load_json(self, name: str) -> dict[str, Any] | None:
        """Return the values of NAME.json. None without a directory or a readable file."""
        if self.folder is None:
            return None
        try:
            return dict(json.loads((self.folder / f"{name}.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def save_json(self, name: str, values: dict[str, Any]) -> None:
        """Write plain JSON values to NAME.json atomically. Do nothing without a directory."""
        if self.folder is not None:
            write_atomic(self.folder / f"{name}.json", json.dumps(values, indent=2).encode())

    def save_figure(self, name: str, draw: Callable[[], Figure]) -> None:
        """Write the figure that `draw()` returns to NAME.png. Do nothing without a directory."""
        if self.folder is not None:
            write_atomic(self.folder / f"{name}.png", png(draw()))


@cache
def code() -> str:
    """Return a text with the versions of fedveil and its libraries, and a digest of the source.

    The digest tells apart two states of the source with one version number.
    """
    source, digest = Path(fedveil.__file__).parent, hashlib.sha256()
    for path in sorted(source.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(source).as_posix()} {content}\n".encode())
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    return ", ".join([*versions, f"source {digest.hexdigest()[:16]}"])


def audited_digest(recipe: Recipe) -> str:
    """Return the SHA-256 digest, in hexadecimal, by which audit.json names a recipe."""
    return hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()


def _check(folder: Path, about: dict[str, Any]) -> None:
    """Raise BadInput unless a folder is new, or holds the audit with the values `about`."""
    path = folder / ABOUT
    if not path.exists():
        check_new_folder(folder, ("lock", f".{ABOUT}.tmp"), "audit")
        return
    try:
        stored = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as e:
        raise BadInput(f"{path} is not an audit's: use another --out") from e
    for key, value in about.items():
        if stored.get(key) != value:
            raise BadInput(
                f"{folder} holds another audit (its {key} is {stored.get(key)!r}, not {value!r}): "
                "start it again as it was, or use another --out"
            )


def audit_section(audit: Path, run: Path) -> Markup:
    """Return the section of a report on `run` with the tables of the finished audit in `audit`.

    | edge | behaviour |
    |---|---|
    | no audit in the directory, or one that has not ended | BadInput |
    | an audit of another recipe, or found.json with other keys | BadInput |
    | texts with markup in the results | shown as text |
    """
    about, results = _read_json(audit / ABOUT), _read_json(audit / FOUND)
    if about.get("recipe") != audited_digest(recipe_in(run)):
        raise BadInput(f"--audit {audit} is of another recipe than {run}: name an audit of it")
    try:
        findings = [_finding_row(one) for one in results["findings"]]
        leaks = [_leak_row(one) for one in results["leaks"]]
        left_out = [str(one) for one in results["left_out"]]
        violated = bool(results["violated"])
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise BadInput(f"{audit / FOUND} cannot be read: {e}") from e
    content: list[Content] = []
    if findings:
        verdict = tag("p", TEXTS["holds"])
        if violated:
            verdict = tag("p", TEXTS["violated"], class_="warn")
        content += [verdict, table(findings, "Claimed beside empirical", wide=True)]
        if any(one["likeliest epsilon"] for one in findings):
            content.append(tag("p", TEXTS["likeliest"], class_="note"))
    if leaks:
        content.append(table(leaks, "What attacks learn, intervals at 95 %", wide=True))
    if left_out:
        content += [tag("h3", "Left out"), bullet_list(left_out)]
    return section("Attacks on this run", *content, id="audit")


def _finding_row(finding: dict[str, Any]) -> dict[str, Content]:
    """Return the cells, by column, of one of the findings in found.json."""
    estimate = finding["estimate"]
    return {
        "attack": str(finding["attack"]),
        "about": str(finding["what"]),
        "claimed": PrivacyClaim.from_dict(finding["claim"]).short,
        "epsilon found, at least (95 %)": rendered(float(finding["lower_bound"]), ROUND_FLOOR),
        "likeliest epsilon": "" if estimate is None else rendered(float(estimate), ROUND_FLOOR),
        "draws": int(finding["draws"]),
        "the claim": str(finding["verdict"]),
    }


def _leak_row(leak: dict[str, Any]) -> dict[str, Content]:
    """Return the cells, by column, of one of the leaks in found.json. Measures share one cell."""
    claim, texts = leak["claim"], []
    for name, measure in leak["measures"].items():
        value, low, high = measure["value"], measure["low"], measure["high"]
        text = value_text(float("nan" if value is None else value))
        if low is not None and high is not None and math.isfinite(low) and math.isfinite(high):
            text += f" ({value_text(float(low))} to {value_text(float(high))})"
        texts.append(f"{name} {text}")
    return {
        "attack": str(leak["attack"]),
        "about": str(leak["what"]),
        "claimed": "nothing" if claim is None else PrivacyClaim.from_dict(claim).short,
        "found": "; ".join(texts),
    }


def _read_json(path: Path) -> dict[str, Any]:
    """Return the dictionary in a JSON file. BadInput if it is missing or holds anything else."""
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError as e:
        raise BadInput(
            f"{path} is missing: name a directory that `fedveil audit RUN --out` has finished"
        ) from e
    except (OSError, ValueError, TypeError, RecursionError) as e:
        raise BadInput(f"{path} cannot be read: {e}") from e
