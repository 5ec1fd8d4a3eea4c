"""Seconds per whole round of fedveil on one work item: sampler, durable charge, noise included.

(a) is Fu's DP-FedAvg with Laplace noise at the clients, (b) and (c) central DP, (d) DP-SGD inside
the clients, (e) the server's part of central DP on 10 million parameters, (f) to (h) larger modules
by local SGD and by DP-SGD, (i) central DP with secure noise, (j), (k) and (l) central DP, of which
(j) is attacked and (l) is all chunks and hardly any work. The model is measured on
no test split, as with the peers. Workers are one per core, one thread each.
"""

import argparse
import cProfile
import io
import json
import math
import pstats
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from work import WORK, Work

import fedveil as fv
from fedveil.attacks.backdoors import PixelTrigger
from fedveil.base.platforms import one_thread
from fedveil.models import zoo
from fedveil.models.metrics import PerExample
from fedveil.privacy.clip import Norm, add_weighted_
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import Round
from fedveil.privacy.secure import planned_for, with_secure_noise
from fedveil.training.cohort import CohortData
from fedveil.training.engines.processes import Processes
from fedveil.training.engines.serial import Serial
from fedveil.training.gradients.modes import Mode
from fedveil.training.participants import Participants
from fedveil.training.reports import Rows, accept
from fedveil.training.work import ClientWork, poisson_batch

FREE = fv.Budget(math.inf, 1e-6)
PARAMETERS, UPDATES = 10_000_000, 10


def data_of(work: Work) -> fv.FederatedData:
    x, y = work.arrays()
    records = work.clients * work.records
    # Test records that are nobody's: their targets are others, so that none is a client's record.
    test_y = (y[0] + 1) % work.classes if work.classes else y[0] + 1
    return fv.FederatedData(
        x=x.reshape(records, *work.shape),
        y=y.reshape(records),
        offsets=np.arange(0, records + 1, work.records),
        test_x=x[0],
        test_y=test_y,
        classes=work.classes,
    )


def plan_of(work: Work, rounds: int, *, secure: bool = False) -> tuple[PrivacyPlan, ClientWork]:
    budget = planned_for(FREE) if secure else FREE
    if work.batch:
        rate = work.batch / work.records
        plan = fv.dp_sgd(
            fv.samplers.Everyone(),
            work.clients,
            1.0,
            rate=rate,
            steps=work.steps,
            rounds=rounds,
            budget=budget,
            multiplier=1.0,
        )
        return plan, fv.ClientDpSgd(plan.noisy_steps, work.lr)
    steps = fv.ClientSgd(fv.Batches(0, steps=work.steps), lr=work.lr)
    if work.model == "linear":
        plan = fv.client_noise(
            fv.samplers.RoundRobin(work.cohort),
            work.clients,
            fv.clips.PerGradient(fv.clips.Fixed(5.0, Norm.L1), steps.reach),
            laplace=True,
            rounds=rounds,
            budgets=(budget,),
            multiplier=1.0,
        )
        return plan, steps
    schedule = fv.clips.Fixed(1.0)
    sampler = fv.samplers.FixedSize(work.cohort)
    plan = fv.central(sampler, work.clients, schedule, rounds=rounds, budget=budget, multiplier=1.0)
    return plan, steps


def training_of(
    work: Work,
    rounds: int,
    *,
    attacked: bool = False,
    workers: int = 0,
    on_ray: bool = False,
    secure: bool = False,
) -> fv.Training:
    loss: PerExample = fv.cross_entropy if work.classes else fv.models.squared_error
    (plan, steps), data = plan_of(work, rounds, secure=secure), data_of(work)
    participants = Participants()
    if attacked:
        trigger = PixelTrigger(target=0)
        participants = fv.attacks.BackdoorAttack.of(data, trigger, attackers=2, boost=10.0)
    task = fv.Task(work.module(), loss)
    if secure:
        plan = with_secure_noise(plan, task.size, diagnostics=False)
        data = replace(data, most_records=data.longest)
    return fv.Training(
        task,
        data,
        plan,
        steps,
        every=MOST_ROUNDS,
        participants=participants,
        workers=workers,
        chunk=work.chunk,
        mode=Mode.LOOPED if work.chunk else None,
        cluster=fv.engines.RayCluster() if on_ray else None,
    )


MOST_ROUNDS = 10**6


def whole_rounds(training: fv.Training, warm_up: int = 3) -> list[float]:
    """The seconds of each round after the first few, with a ledger on disk."""
    plan, seconds = training.plan, []
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.create(
            Path(folder) / "ledger.db",
            LedgerRun({"run": "benchmark"}, plan.lines, plan.permitted, plan.counted_clients),
        )
        began = time.perf_counter()
        for _ in training.rounds(training.start(), ledger):
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
        ledger.close()
    return seconds[warm_up:]


def examples_of(training: fv.Training, rounds: range) -> list[int]:
    """How many examples DP-SGD really drew in each round."""
    work, streams = training.work, training.streams
    assert isinstance(work, fv.ClientDpSgd)
    everyone = CohortData(training.data, np.arange(training.data.clients))
    return [
        sum(
            int(poisson_batch(work.noisy, everyone, r, s, streams).mask.sum())
            for s in range(work.noisy.steps)
        )
        for r in rounds
    ]


def server_rounds(rounds: int) -> list[float]:
    """Clip 10 updates of 10 million parameters again, sum them, add noise to the sum, divide."""
    plan = fv.central(
        fv.samplers.Everyone(),
        UPDATES,
        fv.clips.Fixed(1.0),
        rounds=rounds + 1,
        budget=FREE,
        multiplier=1.0,
    )
    sent, seconds = torch.randn(UPDATES, PARAMETERS), []
    start = torch.zeros(PARAMETERS)
    state, ids = plan.first_state(start), np.arange(UPDATES)
    for r in range(1, rounds + 2):
        reports = sent.clone()
        began = time.perf_counter()
        round = Round(r, ids, start, plan.clip(state, r), state, Streams(1))
        with one_thread():  # as a worker has; the noise on the sum is drawn on all threads
            rows = Rows.from_reports(reports, PARAMETERS)
            accept(rows, round.clip)
            total = torch.zeros(PARAMETERS, dtype=torch.float64)
            weights = torch.ones(UPDATES, dtype=torch.float64)
            add_weighted_(total, rows.rows, weights)
        plan.release.noise_(total, round)
        total /= plan.release.divisor(UPDATES, plan.expected_cohort)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def million(rounds: int, *, secure: bool, mode: Mode | None) -> fv.Training:
    """A regression of 11 parameters, 10 records a client, about 100 of 10^6 clients in a round."""
    clients = 10**6
    random = np.random.default_rng(3)
    x = random.standard_normal((10 * clients, 10), dtype=np.float32)
    y = x[:, 0].copy()
    # test records that are nobody's: no client's has such a target
    data = fv.FederatedData(x, y, np.arange(0, len(x) + 1, 10), x[:10].copy(), y[:10] + 1, 0)
    task = fv.Task(zoo.linear(10), fv.models.squared_error)
    budget = fv.Budget(8.0, 1e-7)
    plan = fv.central(
        fv.samplers.Poisson(1e-4),
        clients,
        fv.clips.Fixed(1.0),
        rounds=rounds,
        budget=planned_for(budget) if secure else budget,
    )
    if secure:
        plan = with_secure_noise(plan, task.size, diagnostics=False)
        data = replace(data, most_records=10)
    work = fv.ClientSgd(fv.Batches(0, steps=1), lr=0.1)
    return fv.Training(task, data, plan, work, every=MOST_ROUNDS, mode=mode)


def profile(work: Work, rounds: int) -> list[str]:
    """Where one process alone spends its time: the functions with most time of their own."""
    rounds = min(rounds, 3) if work.model not in ("linear", "mlp") else rounds
    training = replace(training_of(work, rounds), workers=1)
    training.engine  # noqa: B018  the choice of the mode is not part of a round
    profiler = cProfile.Profile()
    profiler.enable()
    whole_rounds(training, 0)
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(14)
    lines = text.getvalue().splitlines()
    first = next(i for i, line in enumerate(lines) if "ncalls" in line)
    return [f"{rounds} rounds", *(line.rstrip() for line in lines[first:] if line.strip())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("item", choices=[*WORK, "e", "i"])
    parser.add_argument("--honest", action="store_true", help="item j without the attack")
    parser.add_argument("--seeded", action="store_true", help="item i with seeded noise")
    parser.add_argument("--secure", action="store_true", help="other items with secure noise")
    parser.add_argument("--mode", type=Mode, help="of item i, where it is seeded")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ray", action="store_true", help="two workers on Ray, on this machine")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.profile:
        print(json.dumps({"profile": profile(WORK[arguments.item], arguments.rounds)}))
        return
    answer = {"peer": f"fedveil {version('fedveil')}", "item": arguments.item}
    if arguments.item == "e":
        seconds = server_rounds(arguments.rounds)
        answer["configuration"] = "one process, one thread; two for the noise"
    elif arguments.item == "i":
        secure = not arguments.seeded
        training = million(arguments.rounds + 1, secure=secure, mode=arguments.mode)
        seconds = whole_rounds(training, 1)
        noise = "secure" if secure else "seeded"
        answer["configuration"] = f"{noise} noise, {training.engine.mode}"
    else:
        work = WORK[arguments.item]
        warm_up = 1 if work.name[0] in "fgh" else 3
        attacked = work.name == "j" and not arguments.honest
        where = {"workers": 2 if arguments.ray else arguments.workers, "on_ray": arguments.ray}
        where["secure"] = arguments.secure
        training = training_of(work, arguments.rounds + warm_up, attacked=attacked, **where)
        seconds = whole_rounds(training, warm_up)
        engine = training.engine
        assert isinstance(engine, Serial)
        several = isinstance(engine, Processes) and engine.chunk < work.cohort
        workers = f"{engine.workers} workers" if several else "one process"
        workers += " on Ray" if arguments.ray else ""
        told = f"{engine.mode}, chunks of {engine.chunk}, {workers}"
        answer["configuration"] = f"{told}, attacked" if attacked else told
        if work.batch and not arguments.secure:
            answer["examples"] = examples_of(
                training, range(warm_up + 1, arguments.rounds + warm_up + 1)
            )
    answer["seconds"] = seconds
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
