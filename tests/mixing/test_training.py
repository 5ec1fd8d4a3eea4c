"""LDP-FL from end to end: clients in processes of their own, a mixer process, and the server."""

import asyncio
import json
import multiprocessing
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.mixing.protocol import collect, send_report
from fedveil.privacy.shuffle import highs
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.training.cohort import CohortData
from fedveil.training.evaluate import evaluate
from fedveil.training.exchange import client_report
from fedveil.training.gradients.modes import gradients_of
from fedveil.training.reports import ClientBatch

CLIENTS, ROUNDS, SITES = 12, 2, 3
SMALL = (
    *(f"data.clients={CLIENTS}", f"rounds={ROUNDS}", f"shuffle.minimum={CLIENTS}"),
    *("client.epochs=1", "budget.delta=1e-3", "engine.workers=1", "engine.mode=looped"),
)


class ThroughMixer:
    """An engine whose server sees what the mixer hands on, and nothing else."""

    def __init__(self, job):
        self.job = job
        sizes = ("--positions", str(job.task.size), "--rounds", str(ROUNDS))
        reports = ("--minimum", str(CLIENTS), "--expected", str(CLIENTS), "--seconds", "120")
        self.mixer = subprocess.Popen(
            [sys.executable, "-m", "fedveil", "mixer", "--simulated", *sizes, *reports],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = json.loads(self.mixer.stdout.readline())["port"]

    def run(self, round):
        fork = multiprocessing.get_context("fork")
        sites = [
            fork.Process(target=self.site, args=(round, part))
            for part in np.array_split(round.ids, SITES)
        ]
        for site in sites:
            site.start()
        for site in sites:
            site.join(120)
        assert [site.exitcode for site in sites] == [0] * SITES
        size = self.job.task.size
        made = asyncio.run(collect("127.0.0.1", self.port, round.number, size, minimum=CLIENTS))
        total = self.job.zero()
        total.total += made.sums(*self.two_values(round))
        total.weight, total.clients = float(made.report_counts[0]), int(made.report_counts[0])
        return total

    def two_values(self, round):
        release = self.job.plan.release
        centre, radius = release.ranges.per_coordinate(round.adaptive_state)
        return centre, radius * release.mechanism.kappa

    def site(self, round, ids):
        """What a site's own process does: train, randomise, send."""
        torch.set_num_threads(1)
        job = self.job
        gradients = gradients_of(job.task, fv.engines.Mode.VECTORISED, job.data)
        turn = ClientBatch.from_round(round, CohortData(job.data, ids), gradients)
        rows = client_report(job.work, job.plan, turn).reports.rows
        bits = highs(rows, *self.two_values(round)).numpy()

        async def all_of_them():
            options = {"minimum": CLIENTS}
            await asyncio.gather(
                *(send_report("127.0.0.1", self.port, round.number, b, **options) for b in bits)
            )

        asyncio.run(all_of_them())

    def evaluate(self, params):
        return evaluate(self.job.task, params, self.job.data)

    def close(self):
        self.mixer.terminate()
        self.mixer.wait(120)
        self.mixer.stdout.close()


@pytest.mark.slow
def test_a_training_through_a_mixer_is_the_simulated_one():
    training = build(load_recipe("ldp-fl", SMALL))
    *_, simulated = fv.train(training)
    *_, mixed = fv.train(replace(build(load_recipe("ldp-fl", SMALL)), make_engine=ThroughMixer))
    assert mixed.round == ROUNDS
    assert torch.allclose(mixed.state.params, simulated.state.params, atol=1e-5)
    assert mixed.claim == simulated.claim
    moved = float((mixed.state.params - training.start().params).norm())
    assert moved > 0.1
