"""The parts for apps of plain Flower: a strategy around the app's own, and a mod."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.privacy.ledger.file import read_charges

pytest.importorskip("flwr")

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from flwr.supercore.task_identity import TaskIdentity

from fedveil.flower.drop_in import PrivateMod, PrivateStrategy, flatten, model_update, unflatten

NODES = [11, 12, 13, 14]
BUDGET = fv.Budget(float("inf"), 1e-5)
START = ArrayRecord({"w": Array(np.zeros((2, 3), dtype=np.float32)), "b": Array(np.zeros(2))})
POLICY = {"epsilon": {"client": 1e9}, "seeded": True}


@pytest.fixture(autouse=True)
def in_a_run(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def at_server(multiplier=1e-4, sampler=None, schedule=None, rounds=3, **keys):
    return fv.central(
        sampler or fv.samplers.Everyone(),
        len(NODES),
        schedule or fv.clips.Fixed(1.0),
        rounds=rounds,
        budget=keys.pop("budget", BUDGET),
        multiplier=multiplier,
    )


def at_clients(multiplier=2.0, rounds=3, schedule=None):
    return fv.client_noise(
        fv.samplers.Everyone(),
        len(NODES),
        schedule or fv.clips.Fixed(1.0),
        laplace=False,
        rounds=rounds,
        budgets=(BUDGET,),
        multiplier=multiplier,
    )


class Nodes:
    """Flower's grid with nodes that reply at once; `apps` by node, all others `app`."""

    def __init__(self, app, nodes=NODES, **apps):
        self.app, self.nodes, self.apps = app, list(nodes), apps

    def get_node_ids(self):
        return self.nodes

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"m{number}"
            found = self.apps.get(f"n{message.metadata.dst_node_id}", self.app)(message)
            replies += found if isinstance(found, list) else [found]
        return replies


def sends(*values, metrics=None):
    """A client whose model is so far from the one it was sent."""

    def app(message):
        start = message.content["arrays"]
        vector = flatten(start).clone()
        vector[: len(values)] += torch.tensor(values)
        records = {"arrays": unflatten(vector, start)}
        records["metrics"] = MetricRecord(metrics or {"num-examples": 1000.0, "loss": 0.5})
        return Message(RecordDict(records), reply_to=message)

    return app


def replies(records):
    return lambda message: Message(RecordDict(records), reply_to=message)


def test_a_model_is_one_vector_and_back():
    record = ArrayRecord(
        {"a": Array(np.arange(6, dtype=np.float32).reshape(2, 3)), "b": Array(np.ones(2))}
    )
    assert flatten(record).tolist() == [0, 1, 2, 3, 4, 5, 1, 1]
    back = unflatten(flatten(record) + 1, record)
    assert back["a"].numpy().tolist() == [[1, 2, 3], [4, 5, 6]]
    assert back["b"].numpy().dtype == np.float64
    with pytest.raises(BadInput, match="int64"):
        flatten(ArrayRecord({"n": Array(np.arange(3))}))


def test_another_model_has_not_moved_any_number():
    other = ArrayRecord({"w": Array(np.zeros((3, 2), dtype=np.float32)), "b": START["b"]})
    whole = ArrayRecord({"w": Array(np.zeros((2, 3), dtype=np.int64)), "b": START["b"]})
    broken = Array("float32", (2, 3), "numpy.ndarray", b"no array")
    for record in (other, whole, ArrayRecord({"w": broken, "b": START["b"]}), ArrayRecord()):
        assert len(model_update(record, START)) == 0


def test_a_strategy_gets_the_private_mean_and_nothing_else(tmp_path):
    """Four updates of length 3, clipped to 1, alike: whoever has more examples counts as others."""
    seen = []

    class Looking(FedAvg):
        def aggregate_train(self, server_round, replies):
            seen.append(list(replies))
            return super().aggregate_train(server_round, seen[-1])

    strategy = PrivateStrategy(Looking(), at_server(), tmp_path / "ledger.db")
    grid = Nodes(sends(3.0), n11=sends(3.0, metrics={"num-examples": 1e9}))
    result = strategy.start(grid, START, num_rounds=2)
    assert flatten(result.arrays)[0].item() == pytest.approx(2.0, abs=1e-2)
    assert result.train_metrics_clientapp == {}
    assert result.evaluate_metrics_clientapp == {}
    for (reply,) in seen:
        assert dict(reply.content["metrics"]) == {"num-examples": 1.0}
        assert set(reply.content) == {"arrays", "metrics"}


def test_the_noise_on_the_mean_is_the_plans(tmp_path):
    """2 C over 4 clients, in 8 x 30 draws: outside +-25 % once in 10^7 runs."""
    strategy = PrivateStrategy(FedAvg(), at_server(2.0, rounds=30), tmp_path / "ledger.db")
    models = []
    strategy.start(
        Nodes(sends(0.0)),
        START,
        num_rounds=30,
        evaluate_fn=lambda round, arrays: models.append(flatten(arrays)),
    )
    steps = torch.stack(models).diff(dim=0)
    assert float(steps.std()) == pytest.approx(0.5, rel=0.25)


def test_the_strategys_own_optimiser_steps(tmp_path):
    adam = FedAdam(eta=0.1)
    strategy = PrivateStrategy(adam, at_server(), tmp_path / "ledger.db")
    result = strategy.start(Nodes(sends(1.0)), START, num_rounds=1)
    assert 0 < flatten(result.arrays)[0].item() < 0.9


@pytest.mark.parametrize(
    "bad",
    [
        lambda m: Message(Error(1, "broken"), reply_to=m),
        lambda m: [],
        replies({"arrays": ArrayRecord({"w": START["w"]})}),
        replies({}),
        replies({"arrays": START, "more": START}),
        sends(float("nan")),
    ],
)
def test_whoever_sends_nothing_that_can_be_used_counts_as_zero(tmp_path, bad):
    strategy = PrivateStrategy(FedAvg(), at_server(), tmp_path / "ledger.db")
    result = strategy.start(Nodes(sends(1.0), n12=bad), START, num_rounds=1)
    assert flatten(result.arrays)[0].item() == pytest.approx(0.75, abs=1e-2)


def test_a_reply_counts_once_and_only_if_it_was_asked_for(tmp_path):
    def twice(message):
        reply = sends(1.0)(message)
        stranger = sends(1.0)(message)
        stranger.metadata.__dict__["_src_node_id"] = 99
        return [reply, sends(-1.0)(message), stranger]

    strategy = PrivateStrategy(FedAvg(), at_server(), tmp_path / "ledger.db")
    result = strategy.start(Nodes(sends(0.0), n12=twice), START, num_rounds=1)
    assert flatten(result.arrays)[0].item() == pytest.approx(0.25, abs=1e-2)


STRATEGIES = {
    "FedAvg": FedAvg,
    "FedAdam": lambda: FedAdam(eta=0.1, eta_l=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3),
}


class Numbered(Nodes):
    """Nodes with a new number for each message, as SuperLink gives them."""

    sent = 0

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            self.sent += 1
            message.metadata.__dict__["_message_id"] = f"m{self.sent}"
            found = self.apps.get(f"n{message.metadata.dst_node_id}", self.app)(message)
            replies += found if isinstance(found, list) else [found]
        return replies


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("how", ["never", "late"])
def test_a_late_reply_counts_as_none_in_any_round(tmp_path, name, how):
    """Node 12 says nothing, or says in round 2 what it was asked in round 1."""
    held = []

    def slow(message):
        held.append(sends(1.0)(message))
        return held[:-1] if how == "late" else []

    run = {}
    for told, app in (("slow", slow), ("zero", sends(0.0))):
        strategy = PrivateStrategy(STRATEGIES[name](), at_server(), tmp_path / f"{told}.db", seed=5)
        result = strategy.start(Numbered(sends(1.0), n12=app), START, num_rounds=3)
        run[told] = flatten(result.arrays)
        assert strategy.ledger.charged() == 3
    assert torch.equal(run["slow"], run["zero"])
    assert len(held) == 3
    if name == "FedAvg":
        assert run["slow"][0].item() == pytest.approx(3 * 0.75, abs=1e-2)


def test_epsilon_is_that_of_fedveil_account(tmp_path):
    rounds, rate, noise = 5, 0.5, 1.3
    given = ("--noise", noise, "--rate", rate, "--rounds", rounds, "--delta", 1e-5, "--json")
    command = [sys.executable, "-m", "fedveil", "account", *map(str, given)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    (pld,) = [c for c in json.loads(told.stdout)["claims"] if c["accountant"] == "pld"]
    for name, make in STRATEGIES.items():
        plan = at_server(noise, fv.samplers.Poisson(rate), rounds=rounds)
        strategy = PrivateStrategy(make(), plan, tmp_path / f"{name}.db")
        strategy.start(Nodes(sends(1.0)), START, num_rounds=rounds)
        claim = strategy.claim
        assert claim.epsilon == pytest.approx(pld["epsilon"], rel=1e-9)
        assert (claim.delta, str(claim.neighbours)) == (pld["delta"], pld["neighbours"])


def test_every_round_is_charged_before_anybody_is_asked(tmp_path):
    charged = []

    def looking(message):
        charged.append(len(read_charges(tmp_path / "ledger.db")))
        return sends(1.0)(message)

    strategy = PrivateStrategy(FedAvg(), at_server(multiplier=1.0), tmp_path / "ledger.db")
    strategy.start(Nodes(looking), START, num_rounds=2)
    assert charged == [1] * 4 + [2] * 4
    alone = fv.central(
        fv.samplers.Everyone(),
        len(NODES),
        fv.clips.Fixed(1.0),
        rounds=3,
        budget=BUDGET,
        multiplier=1.0,
    )
    assert strategy.claim == alone.claims(2)[0]


def test_when_the_budget_is_used_up_nobody_is_asked_and_the_model_stays(tmp_path):
    plan = at_server(multiplier=2.0, rounds=5, budget=fv.Budget(3.5, 1e-5))
    assert plan.permitted == 2
    asked, models = [], []

    def looking(message):
        asked.append(message.metadata.dst_node_id)
        return sends(1.0)(message)

    strategy = PrivateStrategy(FedAvg(), plan, tmp_path / "ledger.db")
    result = strategy.start(
        Nodes(looking),
        START,
        num_rounds=5,
        evaluate_fn=lambda round, arrays: models.append(flatten(arrays).tolist()),
    )
    assert len(asked) == 8
    assert models[2:] == [models[2]] * 4
    assert flatten(result.arrays).tolist() == models[2]
    assert strategy.claim.epsilon <= 3.5


def test_a_strategy_is_for_one_run(tmp_path):
    """A second one would have the noise of the first in rounds of the same number."""
    strategy = PrivateStrategy(FedAvg(), at_server(), tmp_path / "ledger.db", seed=1)
    strategy.start(Nodes(sends(1.0)), START, num_rounds=2)
    with pytest.raises(BadInput, match="for one run"):
        strategy.start(Nodes(sends(1.0)), START, num_rounds=2)
    assert strategy.ledger.charged() == 2


def test_the_plan_draws_who_takes_part_and_who_is_away_stays_a_client(tmp_path):
    plan = at_server(sampler=fv.samplers.Poisson(0.5), rounds=20)
    strategy = PrivateStrategy(FedAvg(min_available_nodes=1), plan, tmp_path / "ledger.db", seed=4)
    asked = []

    def looking(message):
        asked.append(message.metadata.dst_node_id)
        return sends(1.0)(message)

    grid = Nodes(looking)
    strategy.start(grid, START, num_rounds=1)
    grid.nodes = NODES[:3]
    for round in range(2, 21):
        sent = strategy.configure_train(round, START, ConfigRecord(), grid)
        result, _ = strategy.aggregate_train(round, grid.send_and_receive(sent))
        assert flatten(result)[0].item() == pytest.approx(len(sent) / 2, abs=1e-2)
    assert 14 not in asked[4:]
    assert 15 <= len(asked) <= 50  # of 61 at rate 1/2; the seed is fixed
    assert strategy.claim == plan.claims(20)[0]


def test_the_sum_of_a_round_is_released_once(tmp_path):
    """Two sums of one round with the same noise would differ by a client in the clear."""
    strategy = PrivateStrategy(FedAvg(min_available_nodes=1), at_server(), tmp_path / "ledger.db")
    grid = Nodes(sends(1.0))
    sent = strategy.configure_train(1, START, ConfigRecord(), grid)
    replies = list(grid.send_and_receive(sent))
    assert strategy.aggregate_train(1, replies)[0] is not None
    assert strategy.aggregate_train(1, replies[1:]) == (None, None)


def test_a_strategy_that_samples_by_itself_is_refused(tmp_path):
    strategy = PrivateStrategy(FedAvg(fraction_train=0.5), at_server(), tmp_path / "ledger.db")
    with pytest.raises(BadInput, match="fraction_train"):
        strategy.start(Nodes(sends(1.0)), START, num_rounds=1)
    assert read_charges(tmp_path / "ledger.db") == []


@pytest.mark.parametrize("nodes", [NODES[:3], [*NODES, 15]])
def test_a_plan_for_another_number_of_nodes_is_refused(tmp_path, nodes):
    strategy = PrivateStrategy(FedAvg(), at_server(), tmp_path / "ledger.db", wait=0.0)
    with pytest.raises(BadInput, match="for 4 clients"):
        strategy.start(Nodes(sends(1.0), nodes), START, num_rounds=1)


def test_a_moving_clip_follows_what_the_server_sees(tmp_path):
    schedule = fv.clips.Quantile(0.1, 0.5, lr=1.0, noise=1e-3)
    plan = at_server(multiplier=1e-4, schedule=schedule)
    strategy = PrivateStrategy(FedAvg(), plan, tmp_path / "ledger.db")
    result = strategy.start(Nodes(sends(5.0)), START, num_rounds=2)
    expected = 0.1 + 0.1 * np.exp(0.5)  # all were too long, so the clip grew once
    assert flatten(result.arrays)[0].item() == pytest.approx(expected, rel=0.02)


def test_secure_noise_is_made_for_the_model(tmp_path):
    budget = fv.releases.planned_for(fv.Budget(8.0, 1e-5))
    plan = fv.central(
        fv.samplers.Everyone(), len(NODES), fv.clips.Fixed(1.0), rounds=2, budget=budget
    )
    strategy = PrivateStrategy(
        FedAvg(), fv.releases.with_secure_noise(plan, 8, diagnostics=False), tmp_path / "a.db"
    )
    result = strategy.start(Nodes(sends(1.0)), START, num_rounds=2)
    assert torch.isfinite(flatten(result.arrays)).all()
    assert strategy.claim.noise == "secure"
    other = PrivateStrategy(
        FedAvg(), fv.releases.with_secure_noise(plan, 9, diagnostics=False), tmp_path / "b.db"
    )
    with pytest.raises(BadInput, match="9 parameters"):
        other.start(Nodes(sends(1.0)), START, num_rounds=2)


def test_plans_that_replies_cannot_keep_are_refused(tmp_path):
    steps = fv.dp_sgd(
        fv.samplers.Everyone(), 4, 1.0, rate=0.5, steps=2, rounds=2, budget=BUDGET, multiplier=1.0
    )
    bits = at_clients(schedule=fv.clips.Quantile(0.1, 0.5, flip=0.2))
    for plan in (steps, bits, fv.PrivacyPlan(fv.samplers.Everyone(), 4, 2)):
        with pytest.raises(BadInput):
            PrivateStrategy(FedAvg(), plan, tmp_path / "ledger.db")
    assert not (tmp_path / "ledger.db").exists()
    PrivateStrategy(FedAvg(), at_server(), tmp_path / "ledger.db")
    with pytest.raises(BadInput, match="exists"):
        PrivateStrategy(FedAvg(), at_server(), tmp_path / "ledger.db")


def training(*values, fails=False):
    app = ClientApp()

    @app.train()
    def train(message, context):
        if fails:
            raise RuntimeError("too many records")
        return sends(*values)(message)

    return train


def asked(round=1, run=7, arrays=START, kind="train"):
    records = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": round})})
    message = Message(records, 11, kind)
    message.metadata.__dict__.update(_message_id="m", _run_id=run)
    return message


CONTEXT = Context(1, 11, {}, RecordDict(), {})


def report(reply):
    return flatten(reply.content["arrays"])


def test_what_leaves_a_client_is_clipped_and_noised_and_has_no_metrics(tmp_path):
    mod = PrivateMod(at_clients(1e-3), tmp_path / "ledger", POLICY)
    reply = mod(asked(), CONTEXT, training(100.0))
    assert report(reply)[0].item() == pytest.approx(1.0, abs=0.05)
    assert report(reply)[1].item() != 0.0
    assert dict(reply.content["metrics"]) == {"num-examples": 1.0}
    assert set(reply.content) == {"arrays", "metrics"}
    assert reply.content["arrays"]["b"].numpy().dtype == np.float64


def test_the_noise_of_a_reply_is_the_plans(tmp_path):
    """Standard deviation 2 x 2 C over 8 x 30 draws: outside +-25 % once in 10^7 runs."""
    mod = PrivateMod(at_clients(2.0, rounds=30), tmp_path / "ledger", POLICY)
    drawn = torch.cat([report(mod(asked(k), CONTEXT, training(0.0))) for k in range(1, 31)])
    assert float(drawn.std()) == pytest.approx(4.0, rel=0.25)


def test_a_client_charges_before_it_trains_and_declines_what_it_has_done(tmp_path):
    mod = PrivateMod(at_clients(), tmp_path / "ledger", POLICY)
    charged = []

    def looking(message, context):
        charged.append(len(read_charges(tmp_path / "ledger" / "ledger.db")))
        return sends(1.0)(message)

    assert mod(asked(1), CONTEXT, looking).has_content()
    again = mod(asked(1), CONTEXT, looking)
    assert again.has_error()
    assert "declined" in again.error.reason
    assert mod(asked(3), CONTEXT, looking).has_content()
    assert mod(asked(2), CONTEXT, looking).has_error()
    assert charged == [1, 2]


def test_a_clients_policy_holds_over_runs(tmp_path):
    plan = at_clients()
    cost = plan.claims(3)[0].epsilon
    mod = PrivateMod(plan, tmp_path / "ledger", {**POLICY, "epsilon": {"client": 1.5 * cost}})
    assert mod(asked(run=7), CONTEXT, training(1.0)).has_content()
    assert mod(asked(run=8), CONTEXT, training(1.0)).has_error()


@pytest.mark.parametrize(
    "message",
    [
        lambda: asked(0),
        lambda: asked(4),
        lambda: asked("1"),
        lambda: asked(kind="evaluate"),
        lambda: asked(kind="query"),
        lambda: asked(arrays=ArrayRecord({"w": Array(np.full(3, np.nan, dtype=np.float32))})),
        lambda: asked(arrays=ArrayRecord({"w": Array(np.arange(3))})),
    ],
)
def test_a_client_declines_what_is_not_the_plans(tmp_path, message):
    mod = PrivateMod(at_clients(), tmp_path / "ledger", POLICY)
    reply = mod(message(), CONTEXT, training(1.0))
    assert reply.has_error()
    assert not (tmp_path / "ledger" / "ledger.db").exists()


@pytest.mark.parametrize(
    "train",
    [
        training(fails=True),
        training(float("nan")),
        lambda message, context: Message(Error(2, "broken"), reply_to=message),
        lambda message, context: replies({"arrays": ArrayRecord({"w": START["w"]})})(message),
    ],
)
def test_training_that_fails_sends_a_randomised_zero(tmp_path, train):
    mod = PrivateMod(at_clients(1e-3), tmp_path / "ledger", POLICY)
    found = report(mod(asked(), CONTEXT, train))
    assert 0 < float(found.abs().max()) < 0.05


def test_mods_and_strategies_that_contradict_each_other_are_refused(tmp_path):
    with pytest.raises(BadInput, match="the server's"):
        PrivateMod(at_server(), tmp_path / "ledger", POLICY)
    with pytest.raises(BadInput, match="policy"):
        PrivateMod(at_clients(), tmp_path / "ledger", {"epsilon": 3})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeded": False}, "policy.seeded is false"),
        ({"trust": ["central"]}, "needs local trust"),
        ({"noise": 2.5}, "it is 2, and policy.noise is 2.5"),
        ({"epsilon": {"client": float("nan")}}, "policy.epsilon.client is nan"),
        ({"delta": float("nan")}, "policy.delta is nan"),
        ({"days": -5}, "policy.days is -5"),
        ({"steps": 3}, "policy.steps is for sites"),
        ({"recipes": ["central"]}, "policy.recipes is for sites"),
        ({"repeats": 1}, "policy.repeats is for sites"),
    ],
)
def test_a_policy_that_the_plan_is_not_within_is_refused(tmp_path, changes, words):
    with pytest.raises(BadInput, match=words):
        PrivateMod(at_clients(), tmp_path / "ledger", {**POLICY, **changes})


def test_a_client_that_cannot_charge_tells_the_server_nothing_about_it(tmp_path, monkeypatch):
    def damaged(*args):
        raise ValueError("row 17 of patients.db")

    monkeypatch.setattr("fedveil.flower.site_ledger.SiteLedger.charge", damaged)
    reply = PrivateMod(at_clients(), tmp_path / "ledger", POLICY)(asked(), CONTEXT, training(1.0))
    assert reply.error.reason == "declined: the client was told why"


def test_mod_and_strategy_together(tmp_path):
    """Both keep a ledger, and both come to the same claim."""
    plan = at_clients(2.0)
    mods = {node: PrivateMod(plan, tmp_path / f"{node}", POLICY) for node in NODES}

    def client(message):
        message.metadata.__dict__["_run_id"] = 7
        return mods[message.metadata.dst_node_id](message, CONTEXT, training(1.0))

    strategy = PrivateStrategy(FedAvg(), plan, tmp_path / "server.db")
    strategy.start(Nodes(client), START, num_rounds=3)
    charges = [read_charges(tmp_path / f"{node}" / "ledger.db") for node in NODES]
    assert [len(each) for each in charges] == [3] * 4
    assert strategy.claim == plan.claims(3, np.full(4, 3))[0]


def test_the_documentations_lines_run(tmp_path, monkeypatch):
    """As they stand there, each in under 15 lines."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
    server, client = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert max(len(block.splitlines()) for block in (server, client)) < 15
    here = {"FedAvg": FedAvg, "ClientApp": ClientApp, "clients": 4, "parameters": 8}
    here |= {"grid": Nodes(sends(1.0)), "initial_arrays": START}
    exec(server, here)
    assert here["strategy"].ledger.charged() == 20
    exec(client, here)
    here["app"].train()(training(1.0))
    reply = here["app"](asked(), CONTEXT)
    assert reply.has_content()
    assert len(read_charges(tmp_path / "ledger" / "ledger.db")) == 1
