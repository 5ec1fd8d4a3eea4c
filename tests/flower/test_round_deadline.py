"""The deadline of rounds with a secret cohort follows from a rehearsal, and from nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.flower.messages import (
    Answer,
    Arrival,
    Refusal,
    RehearsalAsk,
    Reply,
    ServerMessage,
    from_parts,
    new_run_id,
    to_parts,
)
from fedveil.flower.round_deadline import Rehearsal, deadline_after
from fedveil.flower.site import Site
from tests.flower.conftest import FREE, NAMES, SECURE, Trio, lines
from tests.flower.sites import CENTRAL, POLICY, charges, open_site, records
from tests.flower.sites import Server as Asker
from tests.flower.transports import InProcess, dies, refuses

POISSON: dict[str, Any] = {**CENTRAL, "noise": SECURE, "budget": FREE, "rounds": 2}
Make = Callable[..., Trio]


def slow(rehearsing: float, real: float = 0.0) -> Any:
    """A site that takes so many seconds to rehearse, and to answer a real ask."""

    def behave(transport: InProcess, ask: ServerMessage, reply: Reply) -> list[Arrival]:
        transport.now += rehearsing if isinstance(ask, RehearsalAsk) else real
        return [Arrival(reply.site, reply)]

    return behave


def rehearsed(three: Trio, **behaviour: Any) -> dict[str, Any]:
    """Run with these behaviours; the line about the rehearsal."""
    three.transport.behaviour = behaviour
    three.server(deadline=600.0, rehearsal=50).serve()
    (line,) = [line for line in lines(three.folder / "run") if "rehearsed" in line]
    return line


@pytest.mark.parametrize(
    ("seconds", "deadline"),
    [
        ({"a": 0.0}, 5.0),
        ({"a": 1.6, "b": 0.2}, 5.0),
        ({"a": 1.7}, 7.0),
        ({"a": 3.3}, 10.0),
        ({"a": 23.0}, 70.0),
        ({"a": 24.0}, 100.0),
        ({"a": 150.0}, 500.0),
        ({"a": 190.0}, 600.0),
        ({"a": 599.0}, 600.0),
        ({}, 600.0),
    ],
)
def test_the_rule(seconds: dict[str, float], deadline: float) -> None:
    assert deadline_after(Rehearsal(seconds), 600.0) == deadline
    assert deadline_after(Rehearsal(seconds), 4.0) == 4.0
    assert deadline_after(Rehearsal(seconds, ["c"]), 600.0) == 600.0


def test_rounds_take_as_long_as_a_rehearsal_says(stand_ins: Make) -> None:
    three = stand_ins(POISSON)
    line = rehearsed(three, north=slow(1.0), south=slow(2.0))
    assert line["deadline"] == 10.0  # of 3 seconds, as sites are asked one after the other here
    assert line["rehearsed"] == {"north": 1.0, "south": 3.0, "west": 3.0}
    assert three.transport.now == 2 * 3.0 + 2 * 10.0


def test_real_answers_do_not_change_it(stand_ins: Make) -> None:
    """How slow those are who are asked is secret: another cohort, the same length."""
    lengths = set()
    for real in (0.0, 0.1, 3.0):
        three = stand_ins(POISSON)
        for name in ("run", "sites.jsonl"):
            assert name
        three.transport.behaviour = {"north": slow(0.5, real), "south": slow(0.5, real / 2)}
        name = f"run-{real}"
        three.server(name, deadline=600.0, rehearsal=50).serve()
        found = [x["deadline"] for x in lines(three.folder / name) if "rehearsed" in x]
        lengths.add((three.transport.now, *found))
    assert lengths == {(2 * 1.0 + 2 * 5.0, 5.0)}


def test_all_sites_rehearse_and_the_first_time_does_not_count(stand_ins: Make) -> None:
    three, asked = stand_ins(POISSON), []

    def warm(transport: InProcess, ask: ServerMessage, reply: Reply) -> list[Arrival]:
        if isinstance(ask, RehearsalAsk):
            asked.append(ask)
            transport.now += 100.0 if len(asked) == 1 else 1.0
        return [Arrival(reply.site, reply)]

    line = rehearsed(three, north=warm)
    assert line["deadline"] == 5.0
    assert {*line["rehearsed"]} == {*NAMES}
    first, second = asked
    assert first.run != second.run
    real = [ask for ask in three.transport.asks if type(ask) is not RehearsalAsk]
    assert {ask.run for ask in real}.isdisjoint({first.run, second.run})


@pytest.mark.parametrize("behaviour", [dies, refuses, slow(601.0)], ids=["dies", "refuses", "slow"])
def test_a_site_that_did_not_rehearse_keeps_the_long_deadline(
    stand_ins: Make, behaviour: Any
) -> None:
    line = rehearsed(stand_ins(POISSON), west=behaviour)
    assert (line["absent"], line["deadline"]) == (["west"], 600.0)


def test_a_rehearsal_is_for_secret_cohorts_alone(stand_ins: Make) -> None:
    public = {**POISSON, "sample": {"kind": "all"}}
    with pytest.raises(BadInput, match="rehearsal is 50 and rounds end when all have answered"):
        stand_ins(public).server(rehearsal=50)
    with pytest.raises(BadInput, match="rehearsal is 0: 1 to 1,000,000"):
        stand_ins(POISSON).server("other", rehearsal=0)


def site(folder: Path, size: int = 24, **keys: Any) -> Site:
    data = records(size=size)
    return open_site(folder, POISSON, {**POLICY, "delta": 0.1}, data, number=0, **keys)


def ask(asker: Asker) -> RehearsalAsk:
    real = asker.ask()
    return RehearsalAsk(new_run_id(), 1, 0, real.plan, real.params, real.moving)


def test_a_site_rehearses_without_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work has made-up records, as many as are declared; zeros leave; nothing is charged."""
    worked: list[Any] = []
    report = Site._client_report

    def watched(self: Site, clients: Any) -> Any:
        worked.append(clients.cohort.data)
        return report(self, clients)

    monkeypatch.setattr(Site, "_client_report", watched)
    north = site(tmp_path / "a", rehearsal=30)
    reply: Any = north.answer(ask(Asker(north)))
    assert isinstance(reply, Answer)
    assert not reply.report.any()
    assert reply.report.shape == north.training.start().params.shape
    assert (worked[0].records, charges(north)) == (30, 0)
    assert not (north.ledger.folder / "asks.db").exists()
    own = torch.tensor(north.records.x)
    assert not any(torch.equal(row, mine) for row in torch.tensor(worked[0].x) for mine in own)
    other = open_site(
        tmp_path / "b", POISSON, {**POLICY, "delta": 0.1}, records(7), number=0, rehearsal=30
    )
    other.answer(ask(Asker(other)))
    assert (worked[1].x == worked[0].x).all()  # of the form of the records alone


def test_a_rehearsal_is_no_answer_to_a_round(tmp_path: Path) -> None:
    """It is not kept, and the real ask after it is charged and answered as ever."""
    north = site(tmp_path, rehearsal=30)
    asker = Asker(north)
    real = asker.ask()
    same = RehearsalAsk(real.run, 1, 0, real.plan, real.params, real.moving)
    assert not north.answer(same).report.any()  # type: ignore[union-attr]
    reply: Any = north.answer(real)
    assert reply.report.any()
    again: Any = north.answer(same)
    assert not again.report.any()


def test_who_declines_a_round_declines_its_rehearsal(tmp_path: Path) -> None:
    north = site(tmp_path / "a")
    reply: Any = north.answer(ask(Asker(north)))
    assert isinstance(reply, Refusal)
    assert reply.reason == "this site's site.toml has no rehearsal"
    north = site(tmp_path / "b", rehearsal=30)
    asked = ask(Asker(north))
    other = RehearsalAsk(asked.run, 1, 0, "0" * 64, asked.params, asked.moving)
    assert isinstance(north.answer(other), Refusal)


def test_a_site_with_more_records_is_told_when_it_joins(tmp_path: Path) -> None:
    assert site(tmp_path / "a", size=24, rehearsal=24)
    with pytest.raises(BadInput, match=r"there are 25 records and rounds are long enough for 24"):
        site(tmp_path / "b", size=25, rehearsal=24)


def test_a_rehearsal_survives_the_wire(tmp_path: Path) -> None:
    asked = ask(Asker(site(tmp_path)))
    read: Any = from_parts(*to_parts(asked))
    assert type(read) is RehearsalAsk
    assert torch.equal(read.params, asked.params)


def test_a_rehearsal_that_fails_is_one_sentence_and_takes_the_memory_of_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    north = site(tmp_path, rehearsal=1_000_000)
    made_up, _ = north._made_up
    assert made_up.records == 1_000_000
    assert not any(made_up.x.strides[:1])  # type: ignore[union-attr]

    def fails(*args: Any) -> Any:
        raise RuntimeError("out of memory at 0x13")

    monkeypatch.setattr("fedveil.flower.site.client_report", fails)
    reply: Any = north.answer(ask(Asker(north)))
    assert reply.reason == "the round could not be rehearsed: the site's owner was told why"
    assert charges(north) == 0
