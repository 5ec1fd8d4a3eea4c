"""The table of docs/layers.md: what record-level clipping does with each kind of layer.

The kinds are those of tests/training/gradients/kinds.py, where each one is compared with a loop
over single records, and the way it goes is asserted.

python benchmarks/layers.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "layers.md"
WAYS = {
    "formula": "formula",
    "mixed": "formulas, and a copy per record of what has none",
    "copies": "a copy of the parameters per record",
    "looped": "record by record",
}
HEAD = """# Kinds of layers under record-level clipping

Written by `python benchmarks/layers.py` from `tests/training/gradients/kinds.py`, where
record-level clipping of every kind (L2 and L1) is compared with a loop over single
records, to 1e-4.

- *formula*: lengths and sums from what each layer saw and what came back to it.
- *a copy per record*: under `vmap` each record has the parameter for itself, so autograd gives its
  own gradient; for small parameters (norms, PReLU, places) that costs next to nothing.
- *record by record*: `vmap` has no rule for an operation; always right, and slow.

Each row is a module with that layer and a linear head, which has a formula. Refused, with a line
that says what to do: batch norm, sparse gradients, `max_norm`, weights that a hook computes
(`torch.nn.utils.weight_norm`). L1 clips always write out one gradient per record.

| kind | how its gradients are clipped |
|---|---|
"""


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.training.gradients.kinds import KINDS

    rows = [f"| {name} | {WAYS[kind.way]} |" for name, kind in KINDS.items()]
    PAGE.write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
