"""What updates show under each recipe: docs/results/inversion.md and properties.md.

    python benchmarks/leaks.py inversion mnist-cnn      # or mnist-mlp, digits
    python benchmarks/leaks.py methods                  # DLG, iDLG and cosine, one record and more
    python benchmarks/leaks.py properties digits planted               # and recipes, default: all
    python benchmarks/leaks.py properties femnist thickness            # or slant
    python benchmarks/leaks.py properties femnist slant passively fedsgd    # no active attack
    python benchmarks/leaks.py properties loans purpose=credit_card    # or addr_state=CA

Data are looked for in $FEDVEIL_DATA. A picture goes to docs/results.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fedveil.audit.findings import Leak
from fedveil.audit.inversion import InversionAudit, Reconstruction, side_by_side
from fedveil.audit.property_attack import PropertyAudit
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.training.session import Training
from fedveil.tuning.figures import png

RESULTS = Path(__file__).parents[1] / "docs" / "results"

IMAGES = {
    "digits": ("data.name=digits", "model.name=mlp", "model.hidden=[32]"),
    "mnist-mlp": ("data.name=mnist", "model.name=mlp", "model.hidden=[64]"),
    "mnist-cnn": ("data.name=mnist", "model.name=fu-cnn"),
}
WRITERS = ("data.name=femnist", "data.partition=natural", "data.digits=true", "data.clients=300")
CLIENTS = {
    "digits": ("data.name=digits", "data.clients=200", "model.name=mlp", "model.hidden=[32]"),
    "femnist": (*WRITERS, "data.min_records=5", "model.name=mlp", "model.hidden=[32]"),
    "loans": ("data.name=saved", "data.clients=none", "data.partition=none", "model.name=linear"),
}
COHORTS = {
    "fedsgd": ("sample.size=100",),
    "fedavg": ("sample.size=100",),
    "norm-bound": ("sample.size=100",),
    "dp-sgd": ("sample.size=40",),
    "ldp-sgd": ("sample.size=40",),
    "ldp-fl": ("shuffle.minimum=180", "rounds=2"),
}
PASSIVELY = "passively"
LOANS = "lending_club/lending_club_loans.parquet"
ABOUT = (
    *("zip_code", "loan_amnt", "term", "annual_inc", "dti", "revol_util", "total_acc"),
    *("home_ownership", "purpose", "addr_state", "int_rate"),
)
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
    asked = InversionAudit(clients=4, steps=200, restarts=1)
    pictures: dict[str, Reconstruction] = {}

    def leaks() -> Iterator[tuple[str, Leak]]:
        for name, settings in RECIPES.items():
            fixed = (*IMAGES[case], "data.clients=500", "data.seed=1", "engine.mode=looped")
            for found, leak in asked.reconstructions(training(name, *fixed, *settings)):
                pictures[f"{name}, {found.view.split(',')[0]}"] = found
                yield name, replace(leak, what=found.view)

    table(case, leaks())
    (RESULTS / f"inversion-{case}.png").write_bytes(png(side_by_side(pictures)))


def methods() -> None:
    """FedSGD without noise: three methods, three models, one record and more."""

    def leaks() -> Iterator[tuple[str, Leak]]:
        cases = [*IMAGES.items(), ("mnist-small-cnn", ("data.name=mnist", "model.name=small-cnn"))]
        for case, settings in cases:
            fixed = ("data.clients=100", "data.seed=1", "engine.mode=looped")
            built = training("fedsgd", *fixed, *settings)
            for method in ("dlg", "idlg", "cosine"):
                asked = InversionAudit(clients=4, method=method, steps=200, restarts=1)
                for leak in asked.leaks(built):
                    yield case, leak
            for records in (2, 4):
                asked = InversionAudit(clients=2, records=records, steps=200, restarts=1)
                for leak in asked.leaks(built):
                    yield case, leak

    table("methods", leaks())


def loans(folder: str) -> str:
    """Loans by the borrower's postal district; a district has 50 of them or is left out."""
    from pyarrow import parquet

    table = parquet.read_table(Path(os.environ["FEDVEIL_DATA"]) / LOANS, columns=list(ABOUT))
    whole = table.drop_null()
    data = FederatedData.from_table(
        whole, target="int_rate", client="zip_code", features=ABOUT[1:-1], min_records=50
    )
    data.save(Path(folder) / "loans")
    return f"data.path={Path(folder) / 'loans'}"


def properties(case: str, feature: str, only: list[str]) -> None:
    """Every recipe, one property."""
    asked = PropertyAudit(feature, rounds=10, active=PASSIVELY not in only)
    only = [name for name in only if name != PASSIVELY]

    def leaks() -> Iterator[tuple[str, Leak]]:
        for name, settings in RECIPES.items():
            if only and name not in only:
                continue
            try:
                some = (*CLIENTS[case], *settings, *COHORTS.get(name, ()), *path)
                for leak in asked.leaks(training(name, *some)):
                    yield name, leak
            except BadInput as refused:
                print(f"| `{name}` | {refused} |")

    with tempfile.TemporaryDirectory() as folder:
        path = (loans(folder),) if case == "loans" else ()
        table(f"{case}, {feature}", leaks())


if __name__ == "__main__":
    began = time.perf_counter()
    match sys.argv[1:]:
        case ["inversion", case]:
            inversion(case)
        case ["methods"]:
            methods()
        case ["properties", case, feature, *only]:
            properties(case, feature, only)
        case _:
            raise SystemExit(__doc__)
    print(f"\n{time.perf_counter() - began:.0f} s")
