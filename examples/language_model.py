"""Predicting the next word under central DP: every person is protected from who sees the model.

The sentences are made up. The words are public; where they are not, `buckets` hashes them.
"""

import math
import random
import tempfile

import fedveil as fv

random.seed(0)
WHO, DOES, WHAT = ["ada", "bob", "we", "they"], ["see", "like", "want"], ["tea", "films", "books"]


def sentence() -> str:
    one = [random.choice(WHO), random.choice(DOES), random.choice(WHAT)]
    return f"{' '.join(one)} and {random.choice(WHAT)}"


people = [f"person-{k % 400}" for k in range(4000)]
table = {"person": people, "text": [sentence() for _ in people]}
columns = {"text": {"length": 6, "words": [*WHO, *DOES, *WHAT, "and"]}}
data = fv.FederatedData.from_table(table, client="person", target="text", columns=columns)

recipe = {
    "name": "language model",
    "rounds": 15,
    "data": {"name": "own"},
    "model": {"name": "lstm-lm", "embedding": 8, "hidden": [16]},
    "sample": {"kind": "poisson", "rate": 0.5},
    "client": {"kind": "sgd", "epochs": 5, "lr": 2.0},
    "clip": {"kind": "fixed", "value": 1.0},
    "noise": {"kind": "gaussian", "where": "server"},
    "budget": {"epsilon": 8.0, "delta": 1e-4},
}
with tempfile.TemporaryDirectory() as folder:
    run = fv.run(recipe, data=data, out=f"{folder}/run")
    losses = [row["loss"] for row in run.history]
    print(f"perplexity {math.exp(losses[0]):.1f}, then {math.exp(losses[-1]):.2f}")
    print(run.claims[0].short)
    print(run.predict({"text": ["ada", "They like", "we want tea"]})["prediction"])
