"""The grid of Fu et al.'s Fig. 5: the loss after T iterations against E, for four epsilons.

5,000 clients of 80 records, 500 of them per round in turn, E in {1, 2, 3, 4, 6, 12}, 20 repetitions
each, Laplace noise at the clients calibrated to the budget. `--rounds` has T = 120 count rounds of
E local iterations each; otherwise, as in the paper, it counts local iterations: 120 / E rounds.
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time

import torch
from ours import data_of
from work import WORK

import fedveil as fv
from fedveil.privacy.clip import Norm
from fedveil.training.gradients.modes import Mode

ITERATIONS = 120
LOCAL_STEPS = (1, 2, 3, 4, 6, 12)
EPSILONS = (1.0, 3.0, 5.0, math.inf)
REPETITIONS = 20

DATA = data_of(WORK["a-1"])


def final_loss(job: tuple[int, float, int, int]) -> float:
    """One training from zero; the loss on the test records at its end."""
    steps, epsilon, seed, rounds = job
    torch.set_num_threads(1)
    work = fv.ClientSgd(fv.Batches(0, steps=steps), lr=0.05)
    schedule = fv.clips.PerGradient(fv.clips.Fixed(2.0, Norm.L1), work.reach)
    sampler = fv.samplers.RoundRobin(500)
    if math.isinf(epsilon):
        plan = fv.unprotected(sampler, DATA.clients, rounds=rounds, schedule=schedule)
    else:
        plan = fv.client_noise(
            sampler,
            DATA.clients,
            schedule,
            laplace=True,
            rounds=rounds,
            budgets=(fv.Budget(epsilon, 1e-5),),
        )
    task = fv.Task(WORK["a-1"].module(), fv.models.squared_error)
    training = fv.Training(
        task, DATA, plan, work, seed=seed, mode=Mode.VECTORISED, workers=1, every=rounds
    )
    *_, last = fv.train(training)
    return last.metrics["loss"]


def grid(*, count_rounds: bool) -> dict[str, object]:
    jobs = [
        (steps, epsilon, seed, ITERATIONS if count_rounds else ITERATIONS // steps)
        for steps in LOCAL_STEPS
        for epsilon in EPSILONS
        for seed in range(REPETITIONS)
    ]
    began = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        losses = pool.map(final_loss, jobs, chunksize=1)
    seconds = time.perf_counter() - began
    table = {
        f"E={steps} epsilon={epsilon:g}": statistics.median(
            loss for job, loss in zip(jobs, losses, strict=True) if job[:2] == (steps, epsilon)
        )
        for steps in LOCAL_STEPS
        for epsilon in EPSILONS
    }
    rounds = sum(job[3] for job in jobs)
    return {"seconds": seconds, "trainings": len(jobs), "rounds": rounds, "median_loss": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", action="store_true")
    print(json.dumps(grid(count_rounds=parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
