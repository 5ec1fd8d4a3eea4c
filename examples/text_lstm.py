"""An LSTM on text under DP-SGD: every sentence is protected, also from the server.

The sentences are made up, eight words each; the label says whether one of them is "good".
"""

import torch
from torch import nn

import fedveil as fv

WORDS, LENGTH, GOOD = 12, 8, 0


class Reader(nn.Module):
    """Embeds words, reads them one by one, and answers with two logits.

    `fv.Lstm` is written out in linear layers, of which DP-SGD knows the lengths of single-example
    gradients without computing them one by one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.lstm = fv.Lstm(8, 16)
        self.answer = nn.Linear(16, 2)

    def forward(self, sentences: torch.Tensor) -> torch.Tensor:
        return self.answer(self.lstm(self.words(sentences)).mean(dim=1))


def sentences(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(1, WORDS, (count, LENGTH))
    labels = torch.randint(0, 2, (count,))
    places = torch.randint(0, LENGTH, (count,))
    words[torch.arange(count), places] *= 1 - labels  # "good" is word 0
    return words, labels


torch.manual_seed(0)
clients = [(f"phone-{k}", *sentences(200)) for k in range(5)]
data = fv.FederatedData.from_clients(clients, test=sentences(500), classes=2)
task = fv.Task(Reader(), fv.cross_entropy, {"accuracy": fv.correct})

# In a step every sentence joins with probability 0.2; 10 steps in each of 8 rounds.
plan = fv.dp_sgd(
    fv.Everyone(), data.clients, 1.0, rate=0.2, steps=10, rounds=8, budget=fv.Budget(8, 1e-4)
)
work = fv.ClientDpSgd(plan.steps, lr=2.0)
for result in fv.train(fv.Training(task, data, plan, work)):
    print(result.round, f"{result.metrics['accuracy']:.3f}", result.claim.short)
