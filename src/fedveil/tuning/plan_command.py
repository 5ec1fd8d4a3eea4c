"""`fedveil plan`: from command line options to a ranked table and a recipe."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedveil.base.checks import check_option
from fedveil.base.errors import BadInput
from fedveil.runs.glossary import terms_line
from fedveil.runs.run_directory import write_atomic
from fedveil.tuning.plan_report import PlanReport, axes_of, plan_page
from fedveil.tuning.recipe_grid import STEPS, Space
from fedveil.tuning.search import OnTrial, simulate
from fedveil.tuning.theory import Choice, FormulaSettings, Sizes, choices, thumb
from fedveil.tuning.theory_plan import theorise
from fedveil.tuning.trials import Laboratory

_SHOWN = 12
_DELTA = 1e-5


@dataclass(frozen=True)
class SizeOptions:
    """Options of a plan by formulas, without a recipe."""

    clients: int | None
    per_round: int | None
    parameters: int | None
    epsilon: float | None
    delta: float | None = None
    noise: str | None = None
    trust: str | None = None

    def settings(self) -> FormulaSettings:
        """The settings, if the options are complete."""
        missing = [
            f"--{name.replace('_', '-')}"
            for name in ("clients", "per_round", "parameters", "epsilon")
            if getattr(self, name) is None
        ]
        if missing:
            raise BadInput(f"formulas need {', '.join(missing)}; or name a recipe to plan")
        for name in ("clients", "per_round", "parameters", "epsilon"):
            check_option(name, getattr(self, name))
        delta = _DELTA if self.delta is None else self.delta
        check_option("delta", delta)
        if self.noise not in (None, "laplace", "gaussian"):
            raise BadInput(f"--noise is {self.noise!r}: use laplace or gaussian")
        if self.trust not in (None, "local", "central"):
            raise BadInput(f"--trust is {self.trust!r}: use local or central")
        return FormulaSettings(
            Sizes(self.clients or 0, self.per_round or 0, self.parameters or 0),
            self.epsilon or 0.0,
            delta,
            laplace=self.noise == "laplace",
            trusted_server=self.trust == "central",
        )

    def check_unused(self) -> None:
        """Refuse these options beside a recipe, which sets them itself."""
        for field in fields(self):
            if getattr(self, field.name) is not None:
                raise BadInput(
                    f"--{field.name.replace('_', '-')} is for formulas without a recipe: use "
                    "--set, as in --set budget.epsilon=1"
                )


def by_formula(sizes: SizeOptions, space: Space, *, as_json: bool) -> None:
    """Plan by formulas, without data or training: how much signal the noise leaves."""
    if space.clips or space.rates:
        raise BadInput("--clips and --rates need a recipe: name one")
    settings = sizes.settings()
    ranked = choices(settings, space.steps, space.iterations)
    most = max(space.iterations)
    if as_json:
        print(json.dumps(_formula_json(settings, ranked, most), indent=2))
        return
    table = Table(title="strongest signal first", title_justify="left")
    for name in ("E", "T", "rounds", "reports per client", "noise / clip", "signal / noise"):
        table.add_column(name, justify="right")
    for choice in ranked[:_SHOWN]:
        table.add_row(
            str(choice.steps),
            str(choice.iterations),
            str(choice.rounds),
            str(choice.turns),
            f"{choice.noise:.3g}",
            f"{choice.signal:.3g}",
        )
    console = Console(markup=False, emoji=False)
    console.print(table)
    _say(console, f"z = {settings.exponent:g}: {settings.convergence}")
    _say(console, f"theory without constants: {thumb(settings, most)}")
    _say(console, f"the claim of the first: {ranked[0].claim}")
    _say(
        console,
        "noise / clip: on a coordinate of a round's mean update, as a share of the clip on one "
        "client's update; signal / noise: of the whole run, if every update reached the clip",
    )
    _say(console, terms_line([ranked[0].claim]))


def by_recipe(
    recipe: str,
    overrides: Sequence[str],
    space: Space,
    laboratory: Laboratory,
    *,
    simulated: bool,
    against: Sequence[str],
    repeat: int,
    out: Path | None,
    on_trial: OnTrial,
) -> PlanReport:
    """Plan on the recipe's data: by the bound of the theory, or by training."""
    if against and not simulated:
        raise BadInput("--against compares by training: add --simulate")
    if out is not None:
        _check_out(out)
    if not simulated:
        return theorise(recipe, overrides, space, laboratory)
    return simulate(
        recipe, overrides, space, laboratory, repeat=repeat, against=against, on_trial=on_trial
    )


def space_of(steps: str, iterations: str, clips: str, rates: str) -> Space:
    """The space that the command line's lists describe.

    Of the steps that are looked at unless others are named, those that fit the iterations stay.
    """
    e, t = _integers("steps", steps), _integers("iterations", iterations)
    if e == STEPS:
        e = tuple(number for number in e if number <= max(t, default=0)) or e
    return Space(e, t, _numbers("clips", clips), _numbers("rates", rates))


def write_and_print(report: PlanReport, recipe: str, out: Path | None, *, as_json: bool) -> None:
    """Write the recipe that won, and print the report."""
    path = _written(report, out, recipe)
    if as_json:
        print(json.dumps(_report_json(report, path), indent=2))
    else:
        _print_report(Console(markup=False, emoji=False), report, path)


def _print_report(console: Console, report: PlanReport, path: Path) -> None:
    table = Table()
    keys = list(dict.fromkeys(key for row in report.rows for key in row.choice))
    remarks = any(row.remark for row in report.rows)
    for name in (
        "E",
        "T",
        "rounds",
        *keys,
        report.measure,
        "noise",
        *(["remark"] if remarks else []),
    ):
        table.add_column(name, overflow="fold")
    for row in report.rows[:_SHOWN]:
        table.add_row(
            str(row.steps),
            str(row.iterations),
            str(row.rounds),
            *(row.choice.get(key, "") for key in keys),
            row.value_text,
            row.noise_text,
            *([row.remark] if remarks else []),
        )
    _say(console, report.title)
    console.print(table)
    if len(report.rows) > _SHOWN:
        _say(console, f"and {len(report.rows) - _SHOWN} more")
    _print_heat(console, report)
    _say(console, f"the claim of the first: {report.rows[0].privacy}")
    for line in report.why:
        _say(console, f"why: {line}")
    for line in report.warnings:
        console.print(f"note: {line}", style="yellow", highlight=False, soft_wrap=True)
    _say(console, terms_line([report.rows[0].privacy]))
    _say(console, f"run it: fedveil run {path}")


def _print_heat(console: Console, report: PlanReport) -> None:
    steps, times = axes_of(report)
    _say(console, f"the least {report.measure} over E (down) and T (across):")
    table = Table()
    table.add_column("E \\ T")
    for t in times:
        table.add_column(str(t), justify="right")
    for e in steps:
        values = [report.heat.get((e, t)) for t in times]
        table.add_row(str(e), *("" if v is None else _heat_text(v) for v in values))
    console.print(table)


def _heat_text(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "diverged"


def _written(report: PlanReport, out: Path | None, recipe: str) -> Path:
    """Write the recipe, and its page beside it."""
    name = Path(recipe).stem
    path = out or _free(Path("runs"), f"plan-{name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"{path.parent} cannot be made: {e.strerror}; use another --out") from e
    write_atomic(path.with_suffix(".html"), plan_page(report, path.name))
    write_atomic(path, report.recipe.encode())
    return path


def _check_out(out: Path) -> None:
    """Refuse, before any training, a path that cannot be written."""
    if out.suffix != ".toml" or out.exists():
        raise BadInput(f"--out {out}: name a .toml file that does not exist")
    if out.with_suffix(".html").exists():
        raise BadInput(f"--out {out}: the page beside it, {out.stem}.html, exists already")
    there = next(parent for parent in out.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise BadInput(f"--out {out}: nothing can be written in {there}")


def _free(folder: Path, name: str) -> Path:
    for number in range(1, 1000):
        path = folder / (f"{name}.toml" if number == 1 else f"{name}-{number}.toml")
        if not path.exists() and not path.with_suffix(".html").exists():
            return path
    raise BadInput(f"{folder}/{name}.toml and 999 more exist: use --out")


def _report_json(report: PlanReport, path: Path) -> dict[str, Any]:
    return {
        "title": report.title,
        "options": [
            {
                "steps": row.steps,
                "iterations": row.iterations,
                "rounds": row.rounds,
                **row.choice,
                report.measure: _number(row.value),
                "half": _number(row.half),
                "noise": _number(row.noise),
                "privacy": row.privacy,
                "remark": row.remark,
            }
            for row in report.rows
        ],
        "why": report.why,
        "notes": report.warnings,
        "recipe": str(path),
    }


def _number(value: float) -> float | None:
    """As JSON can hold it."""
    return value if math.isfinite(value) else None


def _formula_json(settings: FormulaSettings, ranked: Sequence[Choice], most: int) -> dict[str, Any]:
    return {
        "z": settings.exponent,
        "verdict": str(settings.convergence),
        "rule": thumb(settings, most),
        "options": [
            {
                "steps": choice.steps,
                "iterations": choice.iterations,
                "rounds": choice.rounds,
                "reports_per_client": choice.turns,
                "noise": choice.noise,
                "signal": choice.signal,
                "claim": choice.claim.to_dict(),
            }
            for choice in ranked
        ],
    }


def _say(console: Console, text: str) -> None:
    if text:
        console.print(text, highlight=False, soft_wrap=True)


def _integers(name: str, text: str) -> tuple[int, ...]:
    numbers = _numbers(name, text)
    if not all(number.is_integer() for number in numbers):
        raise BadInput(f"--{name} is {text!r}: whole numbers with commas in between are needed")
    return tuple(int(number) for number in numbers)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(",")) if text.strip() else ()
    except ValueError as e:
        raise BadInput(f"--{name} is {text!r}: numbers with commas in between are needed") from e
    if len(set(numbers)) != len(numbers):
        raise BadInput(f"--{name} is {text!r}: a number appears twice")
    return numbers
