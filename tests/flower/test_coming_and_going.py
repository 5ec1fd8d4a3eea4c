"""Between rounds a site joins late, leaves, restarts, or changes its key; and versions differ."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.flower import bundle as bundle_module
from fedveil.flower import messages
from fedveil.flower.bundle import Bundle
from fedveil.flower.federation_files import Federation
from fedveil.flower.federation_server import Server
from fedveil.flower.messages import Answer, Arrival, from_parts, to_parts
from fedveil.flower.owner import Owner
from fedveil.flower.site import Site
from fedveil.privacy.ledger.file import read_charges
from fedveil.runs.recipe import load_recipe
from tests.flower.conftest import AT_SITES, FREE, NAMES, Trio, proven
from tests.flower.sites import LOCAL, charges
from tests.flower.transports import InProcess
from tests.flower.wards import deployed, joined, owners, write_files

AT_SITE: dict[str, Any] = {**LOCAL, "noise": AT_SITES, "budget": FREE, "rounds": 4}
Make = Callable[..., Trio]


def between(three: Trio, changes: dict[int, Callable[[], None]]) -> Callable[[Any], None]:
    """Do something after a round, before the next one."""

    def on_round(line: dict[str, Any]) -> None:
        if line["round"] in changes:
            changes[line["round"]]()

    return on_round


def answered(three: Trio) -> list[list[str]]:
    return [outcome.answered for outcome in three.outcomes]


def test_a_site_that_joins_late_takes_part_from_the_next_round(trio: Make) -> None:
    """It is registered from the start, counts as absent, and is charged for its own turns alone."""
    three = trio(AT_SITE)
    three.transport.away = {"west"}
    three.server(minimum=2).serve(between(three, {2: three.transport.away.clear}))
    assert answered(three) == [["north", "south"]] * 2 + [[*NAMES]] * 2
    assert [charges(site) for site in three.transport.sites.values()] == [4, 4, 2]  # type: ignore[arg-type]
    assert len(read_charges(three.folder / "run" / "ledger.db")) == 4


def test_a_site_that_leaves_is_absent_and_noise_and_charges_stay(trio: Make) -> None:
    three = trio(AT_SITE)
    result = three.server(minimum=2).serve(
        between(three, {1: lambda: three.transport.away.add("south")})
    )
    assert answered(three) == [[*NAMES]] + [["north", "west"]] * 3
    assert [outcome.absent for outcome in three.outcomes] == [[]] + [["south"]] * 3
    assert result["claims"][0]["epsilon"] == proven(three)
    assert len(read_charges(three.folder / "run" / "ledger.db")) == 4
    south = three.transport.sites["south"]
    assert isinstance(south, Site)
    assert charges(south) == 1


def test_a_site_that_restarts_goes_on_with_its_ledger(trio: Make) -> None:
    """A new process knows what the one before has answered, and refuses it."""
    three = trio(AT_SITE)

    def restart() -> None:
        three.transport.sites["south"] = Site.open(three.folder / "south" / "site.toml")

    three.server().serve(between(three, {1: restart, 3: restart}))
    assert answered(three) == [[*NAMES]] * 4
    south = three.transport.sites["south"]
    assert isinstance(south, Site)
    assert charges(south) == 4
    first: Any = south.answer(three.transport.asks[0])
    assert "its end was cut off" in first.reason


def rekeyed(federation: Federation, name: str) -> Federation:
    """The federation after a site has made another key."""
    sites = [
        site.model_copy(update={"key": "SHA256:" + "k" * 43}) if site.name == name else site
        for site in federation.sites
    ]
    return federation.model_copy(update={"sites": sites})


def test_a_site_that_changes_its_key_stays_the_same_client(trio: Make) -> None:
    """The operator stops, enters the new key and resumes: the same run, the same ledgers."""
    three = trio(AT_SITE)
    first = three.server()

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            raise KeyboardInterrupt

    first.serve(stop)
    later = Server.start_or_resume(
        load_recipe(three.recipe),
        rekeyed(first.federation, "south"),
        three.transport,
        three.folder / "run",
        on_outcome=three.outcomes.append,
        clock=three.transport.clock,
        sleep=three.transport.sleep,
    )
    assert later.serve()["rounds"] == 4
    assert answered(three) == [[*NAMES]] * 4
    assert len({ask.run for ask in three.transport.asks}) == 1
    assert [charges(site) for site in three.transport.sites.values()] == [4] * 3  # type: ignore[arg-type]


def test_an_owner_with_a_new_key_needs_a_new_bundle_and_keeps_ledger_and_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    owners(tmp_path)
    deployed(tmp_path).write_folder(tmp_path / "fed")
    path = joined(tmp_path, "north", tmp_path / "fed" / "bundles")
    before = Site.open(path).digest
    Owner.make(tmp_path / "new", "north", [str(tmp_path / "north.csv")])
    for file in ("node", "node.pub"):
        shutil.copy(tmp_path / "new" / file, tmp_path / "north" / file)
    with pytest.raises(BadInput, match=r"is for the key SHA256:.*send .*node\.pub to the operator"):
        joined(tmp_path, "north", tmp_path / "fed" / "bundles", folder=tmp_path / "again")
    assert Site.open(path).digest == before  # the joined site goes on as soon as it is registered
    deployed(tmp_path).write_folder(tmp_path / "fed-2")
    again = joined(
        tmp_path, "north", tmp_path / "fed-2" / "bundles", folder=tmp_path / "north" / "again"
    )
    site = Site.open(again)
    assert site.digest == before
    assert site.ledger.file == Site.open(path).ledger.file


@pytest.fixture
def another_version(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Does something as a party with the next minor version would."""

    def of(do: Callable[[], Any]) -> Any:
        with monkeypatch.context() as there:
            there.setattr(messages, "VERSION", "9.9")
            there.setattr(bundle_module, "VERSION", "9.9")
            return do()

    return of


def test_a_site_of_another_minor_version_is_refused_in_one_line(
    trio: Make, another_version: Callable[[Callable[[], Any]], Any]
) -> None:
    """From the round in which it is updated, and until all parties are."""
    three = trio(AT_SITE)

    def over_the_wire(transport: InProcess, ask: Any, reply: Any) -> list[Arrival]:
        values, arrays = another_version(lambda: to_parts(reply))
        try:
            return [Arrival("south", from_parts(values, arrays))]  # type: ignore[arg-type]
        except BadInput as e:
            return [Arrival("south", str(e))]

    def update() -> None:
        three.transport.behaviour["south"] = over_the_wire

    three.server().serve(between(three, {1: update, 3: three.transport.behaviour.clear}))
    assert [outcome.rejected for outcome in three.outcomes] == [{}, *([REFUSED] * 2), {}]
    assert answered(three)[3] == [*NAMES]


REFUSED = {
    "south": f"a message of version '9.9' and not {messages.VERSION}: use the same version of "
    "fedveil on both sides"
}


def test_a_server_of_another_minor_version_is_refused_in_one_line(
    trio: Make, another_version: Callable[[Callable[[], Any]], Any]
) -> None:
    three = trio(AT_SITE)
    three.server().serve()
    values, arrays = another_version(lambda: to_parts(three.transport.asks[0]))
    with pytest.raises(BadInput, match=r"a message of version '9\.9'") as refused:
        from_parts(values, arrays)
    assert "\n" not in str(refused.value)
    again: Any = another_version(lambda: from_parts(values, arrays))
    assert torch.equal(again.params, three.transport.asks[0].params)


def test_a_bundle_of_another_minor_version_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    another_version: Callable[[Callable[[], Any]], Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    owners(tmp_path)
    another_version(lambda: deployed(tmp_path).write_folder(tmp_path / "fed"))
    words = f"by fedveil '9.9', this is fedveil {messages.VERSION} with format"
    with pytest.raises(BadInput, match=re.escape(words)):
        Bundle.read(tmp_path / "fed" / "bundles" / "north")


def test_an_answer_of_a_site_that_has_left_counts_no_more(trio: Make) -> None:
    """Whoever kept its key and answers an old ask is named, and not summed."""
    three = trio(AT_SITE)
    kept: list[Answer] = []

    def keeps(transport: InProcess, ask: Any, reply: Any) -> list[Arrival]:
        kept.append(reply)
        old = replace(kept[0], site="south")
        return [Arrival("south", old)]

    three.transport.behaviour["south"] = keeps
    three.server().serve()
    assert answered(three) == [[*NAMES]] + [["north", "west"]] * 3
    assert all("attempt 0 at round 1" in o.rejected["south"] for o in three.outcomes[1:])
