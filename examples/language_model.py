"""Predicting the next word under central DP: every person is protected from who sees the model.

The sentences are made up. The words are public; where they are not, `buckets` hashes them.
"""

import random
import tempfile

import fedveil as fv

choice = random.Random(0).choice
WHO, DOES, WHAT = ["ada", "bob", "we", "they"], ["see", "like", "want"], ["tea", "films", "books"]

people = [f"person-{k % 400}" for k in range(4000)]
texts = [f"{choice(WHO)} {choice(DOES)} {choice(WHAT)} and {choice(WHAT)}" for _ in people]
table = {"person": people, "text": texts}
columns = {"text": {"length": 6, "words": [*WHO, *DOES, *WHAT, "and"]}}
whose = {"client": "person", "target": "text", "test": "by-client"}
data = fv.FederatedData.from_table(table, columns=columns, **whose)

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
    "evaluate": {"metrics": ["perplexity"]},
}
with tempfile.TemporaryDirectory() as folder:
    run = fv.run(recipe, data=data, out=f"{folder}/run")
    first, *_, last = (line["perplexity"] for line in run.history)
    print(f"perplexity {first:.1f}, then {last:.2f}")
    print(run.claim.short)
    print(run.predict({"text": ["ada", "They like", "we want tea"]})["prediction"])
