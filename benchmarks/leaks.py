"""What updates show under each recipe: tables and pictures of docs/results/inversion.md, properties.md.

    python benchmarks/leaks.py inversion mnist-cnn      # or mnist-mlp, digits
    python benchmarks/leaks.py methods                  # DLG, iDLG and cosine, one record and more
    python benchmarks/leaks.py properties digits        # or femnist-thickness, femnist-slant, loans

Data are looked for in $FEDVEIL_DATA. A picture goes to docs/results.
"""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fedveil.audit.inversion import InversionAudit, Reconstruction
from fedveil.audit.leak import Leak
from fedveil.audit.pictures import side_by_side_png
from fedveil.audit.property import PropertyAudit
from fedveil.errors import BadInput
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.training.session import Training

RESULTS = Path(__file__).parents[1] / "docs" / "results"

IMAGES = {
    "digits": ("data.name=digits", "model.name=mlp", "model.hidden=[32]"),
    "mnist-mlp": ("data.name=mnist", "model.name=mlp", "model.hidden=[64]"),
    "mnist-cnn": ("data.name=mnist", "model.name=fu-cnn"),
}
CLIENTS = {
    "digits": ("data.name=digits", "data.clients=200", "model.name=mlp", "model.hidden=[32]"),
    "femnist": ("data.name=femnist", "data.partition=natural", "model.name=mlp", "model.hidden=[64]"),
    "loans": ("data.name=table", "model.name=linear"),
}
STEPS = ("client.epochs=3", "client.lr=0.1")
LAPLACE = ("budget.epsilon=8", "client.steps=3", "client.lr=0.1")
RECIPES = {
    "fedsgd": (),
    "fedavg": STEPS,
    "norm-bound": STEPS,
    "central": (*STEPS, "budget.epsilon=8"),
    "dp-sgd": ("client.lr=0.1", "budget.epsilon=8"),
    "ldp-sgd": ("budget.epsilon=8",),
    "dp-fedavg": LAPLACE,
    "ldp-fl": (*STEPS, "rounds=1"),
}


def training(name: str, *settings: str) -> Training:
    """The recipe with these settings, in this process."""
    root = os.environ.get("FEDVEIL_DATA")
    recipe = load_recipe(name, ("engine.workers=1", *settings))
    return replace(build(recipe, None if root is None else Path(root)), workers=1)


def table(title: str, leaks: Iterator[tuple[str, Leak]]) -> None:
    """One line per leak, as it is found."""
    print(f"\n### {title}\n", flush=True)
    head: tuple[str, ...] = ()
    for recipe, leak in leaks:
        if not head:
            head = tuple(measure.name for measure in leak.measures)
            print("| recipe | seen | " + " | ".join(head) + " | claim |")
            print("|---" * (3 + len(head)) + "|", flush=True)
        claim = "nothing" if leak.claim is None else leak.claim.short
        values = " | ".join(str(measure) for measure in leak.measures)
        print(f"| `{recipe}` | {leak.what} | {values} | {claim} |", flush=True)


def inversion(case: str) -> None:
    """Every recipe on one record of the same four clients."""
    asked = InversionAudit(clients=4, steps=300, restarts=2)
    pictures: dict[str, Reconstruction] = {}

    def leaks() -> Iterator[tuple[str, Leak]]:
        for name, settings in RECIPES.items():
            fixed = (*IMAGES[case], "data.clients=500", "data.seed=1", "engine.mode=looped")
            for found, leak in asked.seen(training(name, *fixed, *settings)):
                pictures[f"{name}, {found.view.split(',')[0]}"] = found
                yield name, leak

    table(case, leaks())
    (RESULTS / f"inversion-{case}.png").write_bytes(side_by_side_png(pictures))


def methods() -> None:
    """FedSGD without noise: three methods, three models, one record and more."""

    def leaks() -> Iterator[tuple[str, Leak]]:
        cases = [*IMAGES.items(), ("mnist-small-cnn", ("data.name=mnist", "model.name=small-cnn"))]
        for case, settings in cases:
            fixed = ("data.clients=500", "data.seed=1", "engine.mode=looped")
            built = training("fedsgd", *fixed, *settings)
            for method in ("dlg", "idlg", "cosine"):
                asked = InversionAudit(clients=3, method=method, steps=300, restarts=2)
                for leak in asked.leaks(built):
                    yield case, leak
            for records in (2, 4):
                for leak in InversionAudit(clients=2, records=records, steps=600).leaks(built):
                    yield case, leak

    table("methods", leaks())


def properties(case: str) -> None:
    """Every recipe, one property."""
    data, _, trait = case.partition("-")
    asked = PropertyAudit(trait or "planted", rounds=10)

    def leaks() -> Iterator[tuple[str, Leak]]:
        for name, settings in RECIPES.items():
            try:
                for leak in asked.leaks(training(name, *CLIENTS[data], *settings)):
                    yield name, leak
            except BadInput as refused:
                print(f"| `{name}` | {refused} |")

    table(case, leaks())


if __name__ == "__main__":
    began = time.perf_counter()
    match sys.argv[1:]:
        case ["inversion", case]:
            inversion(case)
        case ["methods"]:
            methods()
        case ["properties", case]:
            properties(case)
        case _:
            raise SystemExit(__doc__)
    print(f"\n{time.perf_counter() - began:.0f} s")
