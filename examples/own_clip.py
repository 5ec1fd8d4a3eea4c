"""A clip schedule of one's own that follows the lengths of updates, and what that costs.

Clients are asked for one number each: how long their update is, up to 1. What they send is
private, so the schedule states it in `statistic`: the plan cuts it, adds noise to the sum, and
accounts for it. Of the noise that a round is planned with, the updates get what is left.
"""

from dataclasses import dataclass

import torch
from torch import nn

import fedveil as fv


@dataclass(frozen=True)
class MeanLength(fv.clips.ClipSchedule):
    """The clip of a round is the mean length of the round before, from a noisy sum."""

    value: float
    noise: float

    @property
    def statistic(self) -> fv.clips.ClipStatistic:
        what = {"word": "lengths", "description": "the lengths of updates, up to 1"}
        fix = {"key": "noise", "setting": self.noise, "remedy": "raise it"}
        return fv.clips.ClipStatistic(width=1, norm_bound=1.0, noise=self.noise, **what, **fix)

    def first_value(self) -> float:
        return self.value

    def clip(self, value: float, round: int) -> fv.clips.Clip:
        return fv.clips.Clip(value)

    def client_statistic(self, lengths, round: int) -> torch.Tensor:
        return lengths.norms.double()[:, None]

    def next_value(self, value: float, noisy: torch.Tensor, expected: float, round: int) -> float:
        return min(1.0, max(0.05, float(noisy[0]) / expected))


torch.manual_seed(0)
x = torch.randn(220, 10, 10)
y = (x[:, :, 0] > x[:, :, 1]).long()
clients = [(f"client-{k}", x[k], y[k]) for k in range(200)]
test = x[200:].flatten(0, 1), y[200:].flatten()
data = fv.FederatedData.from_clients(clients, test=test, classes=2)

schedule = MeanLength(value=1.0, noise=10.0)
plan = fv.central(
    fv.samplers.Everyone(), data.clients, schedule, rounds=15, budget=fv.Budget(8, 1e-5)
)
print(f"noise on updates {plan.release.multiplier:.3f} clips, on lengths {schedule.noise:g}")
task = fv.Task(nn.Linear(10, 2), fv.cross_entropy, {"accuracy": fv.correct})
work = fv.ClientSgd(fv.Batches(size=0, steps=5), lr=0.2)
for result in fv.train(fv.Training(task, data, plan, work)):
    accuracy = result.metrics["accuracy"]
    print(f"{result.round} clip {result.clip:.3f} {accuracy:.3f} {result.claim.short}")
