"""A federation in one process: the run of the simulator, by other means."""

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.flower.federation_server import ABSENT, CARRIED
from fedveil.runs import checkpoint
from tests.flower import transports
from tests.flower.conftest import AT_SITES, FREE, NAMES, SECURE, SEEDED, lines, proven
from tests.flower.sites import CENTRAL, DP_SGD, FEDAVG, LOCAL, QUANTILE, TWO_POINT

AT_CLIENTS = {"kind": "gaussian", "where": "client"}
TOLD = ("epsilon", "delta", "unit", "neighbours", "trust", "accountant", "noise")
CENTRAL_QUANTILE = {
    **CENTRAL,
    "name": "central-quantile",
    "sample": {"kind": "all"},
    "clip": {"kind": "quantile", "value": 0.05, "bit_noise": 20.0, "lr": 1.0},
}


@pytest.mark.parametrize("recipe", [FEDAVG, {**FEDAVG, "server": {"weights": "examples"}}])
def test_without_noise_the_model_is_the_simulators(trio, recipe):
    three = trio({**recipe, "rounds": 3})
    result = three.server().serve()
    three.simulated()
    assert result["rounds"] == 3
    assert torch.allclose(three.model("run"), three.model("simulated"), atol=1e-5)
    assert not torch.allclose(three.model("run"), torch.zeros(()), atol=1e-2)


@pytest.mark.parametrize(
    "recipe",
    [
        {**CENTRAL, "noise": SECURE, "budget": FREE},
        {**CENTRAL, "noise": SEEDED},
        {**LOCAL, "noise": AT_SITES, "budget": FREE},
        {**QUANTILE, "noise": AT_SITES, "budget": FREE},
        {**TWO_POINT, "rounds": 2},
        {**DP_SGD, "noise": {**DP_SGD["noise"], "multiplier": 2.0}, "budget": FREE},
    ],
    ids=["central", "seeded", "ldp-sgd", "quantile", "ldp-fl", "dp-sgd"],
)
def test_claims_are_the_simulators(trio, recipe):
    three = trio(recipe)
    ours, theirs = three.server().serve(), three.simulated()
    assert ours["rounds"] == theirs["rounds"] == recipe["rounds"]
    assert all(outcome.answered == outcome.invited for outcome in three.outcomes)
    assert len(ours["claims"]) == len(theirs["claims"]) > 0
    for a, b in zip(ours["claims"], theirs["claims"], strict=True):
        assert [a[key] for key in TOLD] == [b[key] for key in TOLD]
        assert {CARRIED, ABSENT} == set(a["assumptions"]) - set(b["assumptions"])
    assert proven(three) == ours["claims"][0]["epsilon"]


def test_little_noise_and_a_moving_clip_come_to_what_they_do_in_the_simulator(trio):
    """Bits are flipped at sites with other draws; central ones are not, and noise is small."""
    recipe = {
        **CENTRAL_QUANTILE,
        "rounds": 6,
        "clip": {"kind": "quantile", "value": 0.02, "bit_noise": 0.02, "lr": 0.7},
        "noise": {"kind": "gaussian", "where": "server", "multiplier": 1e-3},
        "budget": {"delta": 1e-5},
    }
    three = trio(recipe)
    three.server().serve()
    three.simulated()
    ours, theirs = (
        [line["clip"] for line in lines(three.folder / name, "metrics.jsonl")[1:]]
        for name in ("run", "simulated")
    )
    assert len(ours) == 6
    assert ours[-1] > 1.5 * ours[0]  # nearly all updates were too long
    np.testing.assert_allclose(ours, theirs, rtol=0.05)


def test_the_server_has_nobodys_records(trio):
    three = trio(LOCAL)
    data = three.server().run.training.data
    assert data.elsewhere == (12, 15, 18)
    assert len(data.y) == 0
    assert data.clients == 3
    assert data.records == 45
    assert [data.client_name(k) for k in range(3)] == list(NAMES)
    assert len(data.test_y) == 30


def test_data_without_records_is_saved_and_opened(trio, tmp_path):
    data = trio(LOCAL).server().run.training.data
    data.save(tmp_path / "public")
    again = fv.FederatedData.open(tmp_path / "public")
    assert again.elsewhere == data.elsewhere
    assert again.fingerprint == data.fingerprint
    assert again.known_as == data.known_as != ""
    assert again.at_sites(NAMES).fingerprint != data.fingerprint
    one, other = (again.at_sites(NAMES, known_as=name).fingerprint for name in ("one", "other"))
    assert one != other


@pytest.mark.parametrize(
    ("changes", "keys", "words"),
    [
        ({"evaluate": {"clients": True}, "noise": AT_CLIENTS}, {}, "evaluate.clients"),
        ({"engine": {"checkpoint": 2}}, {}, "engine.checkpoint"),
        ({"sample": {"kind": "round-robin", "size": 1}}, {"minimum": 2}, "minimum is 2"),
        ({"attack": {"kind": "backdoor", "target": 1, "fraction": 0.4}}, {}, "attack"),
    ],
)
def test_what_cannot_be_done_over_a_federation_is_refused_before_anything_is_made(
    trio, changes, keys, words
):
    three = trio(LOCAL)
    with pytest.raises(BadInput, match=words):
        three.server(recipe={**three.recipe, **changes}, **keys)
    assert not (three.folder / "run" / "recipe.toml").exists()


def test_a_shuffler_is_no_part_of_what_knows_who_sent_what(trio):
    three = trio(TWO_POINT)
    with pytest.raises(BadInput, match="shuffle"):
        three.server(recipe={**three.recipe, "shuffle": {"minimum": 2}})


def test_what_was_asked_and_answered_is_written_down_for_the_server_alone(trio):
    three = trio({**LOCAL, "rounds": 1})
    three.transport.behaviour["west"] = transports.refuses
    three.server().serve()
    path = three.folder / "run" / "sites.jsonl"
    assert path.stat().st_mode & 0o077 == 0
    asking, ended = lines(three.folder / "run")
    ask = three.transport.asks[0].digest
    assert asking == {"asking": 1, "attempt": 0, "sites": list(NAMES), "ask": ask}
    assert ended["seconds"] == 0.0  # the transport's clock stands still
    assert ended["declined"] == {"west": "no budget is left"}
    assert ended["answered"] == ["north", "south"]


def test_checkpoints_are_those_of_a_run(trio):
    three = trio({**LOCAL, "rounds": 2})
    server = three.server()
    server.serve()
    found, remarks = checkpoint.load_latest(
        three.folder / "run" / "checkpoint", server.run.training.start()
    )
    assert found is not None
    assert found.state.round == 2
    assert remarks == []
