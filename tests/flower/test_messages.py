"""What passes between server and sites, without anything that carries it."""

from typing import Any

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.flower.messages import (
    LONGEST_REASON,
    Answer,
    Refusal,
    RoundAsk,
    from_parts,
    new_run_id,
    plan_digest,
    to_parts,
)
from fedveil.runs.recipe import load_recipe
from tests.flower.sites import CENTRAL

RUN, PLAN = "0123456789abcdef" * 2, "a" * 64
VECTOR, MOVING = torch.ones(3), torch.ones(1, dtype=torch.float64)


def ask(**changes: Any) -> RoundAsk:
    said = {"run": RUN, "round": 2, "attempt": 0, "plan": PLAN, "params": VECTOR}
    return RoundAsk(**{**said, "moving": MOVING, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "short"},
        {"run": None},
        {"run": RUN.upper()},
        {"run": RUN + "\n"},
        {"round": 0},
        {"round": 1.0},
        {"round": True},
        {"round": 10**9},
        {"attempt": -1},
        {"plan": "b"},
        {"params": VECTOR.double()},
        {"params": VECTOR[None]},
        {"params": [1.0]},
        {"params": torch.tensor([1.0, torch.nan])},
        {"params": torch.tensor([1.0, torch.inf])},
        {"moving": MOVING.float()},
        {"moving": MOVING * torch.nan},
    ],
)
def test_an_ask_that_is_none_is_not_made(changes):
    ask()
    with pytest.raises(BadInput):
        ask(**changes)


@pytest.mark.parametrize("name", ["", "a b", "../a", "a/b", "-a", "x" * 65, "a\n", 3, None])
def test_a_site_has_a_name_that_can_be_written_anywhere(name):
    Refusal(RUN, 1, 0, "north-1.b_c", "no")
    with pytest.raises(BadInput):
        Refusal(RUN, 1, 0, name, "no")


@pytest.mark.parametrize("reason", ["", "two\nlines", "\x1b[2J", "x" * (LONGEST_REASON + 1), None])
def test_a_reason_is_one_line(reason):
    with pytest.raises(BadInput):
        Refusal(RUN, 1, 0, "north", reason)


@pytest.mark.parametrize(
    "report", [torch.ones(0), torch.ones(2, 2), torch.tensor(1), torch.tensor([torch.nan])]
)
def test_what_is_in_an_answer_is_not_looked_at(report):
    answer = Answer(RUN, 1, 0, "north", report, MOVING)
    back = from_parts(*to_parts(answer))
    assert isinstance(back, Answer)
    assert back.report.dtype is report.dtype
    assert back.report.shape == report.shape


def test_parts_that_are_no_message_are_refused():
    words, arrays = to_parts(ask())
    assert isinstance(from_parts(words, arrays), RoundAsk)
    for wrong in (
        ({**words, "format": 2}, arrays),
        ({**words, "version": "0.1"}, arrays),
        ({k: v for k, v in words.items() if k != "version"}, arrays),
        ({k: v for k, v in words.items() if k != "format"}, arrays),
        ({**words, "kind": "order"}, arrays),
        ({**words, "loss": 1.0}, arrays),
        ({k: v for k, v in words.items() if k != "round"}, arrays),
        (words, {**arrays, "more": np.zeros(1)}),
        (words, {"params": arrays["params"]}),
        (words, {**arrays, "params": np.array(["a"])}),
    ):
        with pytest.raises(BadInput):
            from_parts(*wrong)


def test_what_was_read_is_a_copy():
    values, arrays = to_parts(ask())
    arrays["params"] = arrays["params"].copy()
    back = from_parts(values, arrays)
    arrays["params"][0] = 7.0
    assert isinstance(back, RoundAsk)
    assert back.params[0] == 1.0


def test_runs_have_names_of_their_own():
    assert len({new_run_id() for _ in range(100)}) == 100


def digest(clients: int = 3, **changes: Any) -> str:
    return plan_digest(load_recipe({**CENTRAL, **changes}), clients)


@pytest.mark.parametrize(
    "changes",
    [
        {"clients": 4},
        {"rounds": 5},
        {"seed": 2},
        {"model": {"name": "mlp"}},
        {"sample": {"kind": "poisson", "rate": 0.4}},
        {"client": {"kind": "sgd", "epochs": 3, "lr": 0.1}},
        {"clip": {"kind": "fixed", "value": 0.6}},
        {"noise": {"kind": "gaussian", "where": "server"}},
        {"noise": {"kind": "gaussian", "where": "server", "source": "secure", "multiplier": 1.0}},
        {"budget": {"epsilon": 6.0, "delta": 1e-6}},
        {"server": {"lr": 0.5}},
    ],
)
def test_two_plans_have_two_digests(changes):
    assert digest(**changes) != digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"data": {"name": "mnist", "clients": 7}},
        {"engine": {"workers": 1}},
        {"evaluate": {"every": 2}},
    ],
)
def test_what_each_side_decides_by_itself_is_not_in_the_digest(changes):
    assert digest(**changes) == digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "0" * 32},
        {"round": 3},
        {"attempt": 1},
        {"plan": "b" * 64},
        {"params": torch.tensor([1.0, 1.0, 1.0 + 2**-23])},
        {"params": torch.ones(4)},
        {"params": torch.zeros(0)},
        {"moving": MOVING * (1 + 2**-52)},
        {"moving": torch.ones(2, dtype=torch.float64)},
        {"moving": torch.ones(0, dtype=torch.float64)},
    ],
)
def test_every_part_of_an_ask_is_in_its_digest(changes):
    assert ask().digest == ask().digest
    assert ask(**changes).digest != ask().digest
