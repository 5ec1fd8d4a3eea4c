"""What an auditor does with a finished run: read the ledger, verify it, compare the claims.

The run is made here, in a temporary folder; an auditor is given one, and needs no right to write.
"""

import json
import tempfile
from pathlib import Path

import fedveil as fv
from fedveil.runs.evidence import statements_of, verify_ledger
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run

with tempfile.TemporaryDirectory() as folder:
    directory = Path(folder) / "run"
    recipe = load_recipe("central", ["rounds=10", "budget.epsilon=4.0"])
    Run.start(recipe, directory, None).execute()

    # The ledger alone says what was charged and what it is worth: no model, no data, no program.
    told = statements_of(directory)
    (run,) = told.runs
    print(f"{len(run.charges)} charges, the first of round {run.charges[0].round}")
    for claim in run.claims:
        print(claim)
        for assumption in claim.assumptions:
            print(f"  - {assumption}")
    print(run.remainder())

    # The chain of charges is whole, and the files are those that the run left.
    print(verify_ledger(directory, None).replace(folder, ""))

    # The result must say what the ledger says, to the last digit.
    result = json.loads((directory / "result.json").read_text())
    assert [claim["epsilon"] for claim in result["claims"]] == [c.epsilon for c in run.claims]

    # Somebody writes a better epsilon into the result: it is found.
    result["claims"][0]["epsilon"] = 0.5
    (directory / "result.json").write_text(json.dumps(result))
    try:
        verify_ledger(directory, None)
    except fv.BadInput as e:
        print(f"refused: {e}".replace(folder, ""))
