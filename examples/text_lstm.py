"""An LSTM on texts under DP-SGD: every review is protected, also from the server.

The reviews are made up, by 20 people. Words are hashed, so no vocabulary has to be public.
"""

import random

import fedveil as fv
from fedveil.models.zoo import TextLstm

random.seed(0)
words = ["the", "film", "plot", "was", "acting", "and", "music", "really", "felt", "long"]


def review() -> tuple[str, str]:
    mood = random.choice(["good", "bad"])
    text = [*random.choices(words, k=7), mood]
    return " ".join(random.sample(text, 8)).capitalize() + "!", mood


reviews = [(f"person-{k % 20}", *review()) for k in range(4000)]
table = dict(zip(("person", "text", "mood"), zip(*reviews, strict=True), strict=True))
columns = {"text": {"length": 10, "buckets": 200}, "mood": {"values": ["bad", "good"]}}
whose = {"client": "person", "target": "mood", "test": "by-client"}
data = fv.FederatedData.from_table(table, columns=columns, **whose)

module = TextLstm(data.schema.vocabulary_size, embedding=8, hidden=(16,), outputs=2)
task = fv.Task(module, fv.cross_entropy, {"accuracy": fv.correct})
# In a step every review joins with probability 0.2; 10 steps in each of 8 rounds.
plan = fv.dp_sgd(
    fv.samplers.Everyone(),
    data.clients,
    1.0,
    rate=0.2,
    steps=10,
    rounds=8,
    budget=fv.Budget(8, 1e-4),
)
work = fv.ClientDpSgd(plan.noisy_steps, lr=2.0)
for result in fv.train(fv.Training(task, data, plan, work)):
    print(result.round, f"{result.metrics['accuracy']:.3f}", result.claim.short)
