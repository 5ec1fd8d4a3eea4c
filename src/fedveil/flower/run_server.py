"""A federation's server: a run like `fedveil run`, whose clients are sites.

Recipe, ledger, checkpoints and result are the same, only the engine differs. A server that is
started again with the same run directory resumes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput, FedveilError
from fedveil.data.federated import FederatedData
from fedveil.flower.engine import RemoteEngine
from fedveil.flower.federation import Federation
from fedveil.flower.messages import plan_digest
from fedveil.flower.mixer_link import MixerLink
from fedveil.flower.round_log import ABOUT, About, Outcome, RoundLog
from fedveil.flower.transport import Transport
from fedveil.runs.recipe import Recipe
from fedveil.runs.records import data_of
from fedveil.runs.run import OnRound, Run
from fedveil.training.engines.engine import Job

CARRIED = (
    "whatever carries messages between sites and server counts as the server: it sees who is asked "
    "and what they send"
)
ABSENT = "whether and when a site answers does not depend on its records"

_LOOK = 1.0  # seconds from one look at who is online to the next


class TooFewSites(FedveilError):
    """Not enough sites are online. Nothing was charged for the next round."""


@dataclass
class Server:
    """One run over a federation. Make it with `open`, then call `serve`."""

    run: Run
    federation: Federation
    transport: Transport
    about: About
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        federation: Federation,
        transport: Transport,
        folder: Path,
        data_root: Path | None = None,
        *,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
        allow_code: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> "Server":
        """Start a run in `folder`, or resume the one that is there.

        `on_outcome` is called with each round's outcome. It names sites, which only the server may
        see.
        """
        federation.check()
        check_recipe(recipe)
        about = About.of(folder, plan_digest(recipe, len(federation)))
        log = RoundLog(folder)

        def make_engine(job: Job) -> RemoteEngine:
            mixer = None if federation.mixer is None else MixerLink(federation.mixer)
            return RemoteEngine(
                job,
                federation,
                transport,
                about,
                log,
                on_outcome,
                mixer,
                clock=clock,
                sleep=sleep,
            )

        own: dict[str, Any] = {
            "data": data_without_records(recipe, federation, data_root, about.run),
            "allow_code": allow_code,
            "make_engine": make_engine,
        }
        if (folder / "recipe.toml").exists():
            run = Run.resume(folder, data_root, **own)
        else:
            (folder / ABOUT).unlink(missing_ok=True)  # of a start that went no further
            run = Run.start(recipe, folder, data_root, **own)
            about.write(folder)
        _ = run.training.engine  # made now, so that it refuses before anything is charged
        return cls(run, federation, transport, about, clock, sleep)

    def serve(self, on_round: OnRound = lambda line: None) -> dict[str, Any]:
        """Train like `Run.execute`, and return the result.

        A round is charged only when `minimum` sites are online. If they do not come, the run ends
        as after Ctrl-C, and `TooFewSites` is raised.
        """
        last = self.run.training.plan.permitted

        def next_round(line: dict[str, Any]) -> None:
            on_round(line)
            if line["round"] < last:
                self._wait_for_sites()

        self._wait_for_sites()
        return self.run.execute(next_round)

    def _wait_for_sites(self) -> None:
        """Wait until enough of all sites are online, whoever will be asked."""
        until = self.clock() + self.federation.wait
        names = set(self.federation.names)
        while len(names & self.transport.online()) < self.federation.minimum:
            if self.clock() >= until:
                online = sorted(names & self.transport.online())
                raise TooFewSites(
                    f"of {len(names)} sites {len(online)} are online "
                    f"({', '.join(online) or 'none'}), and federation minimum is "
                    f"{self.federation.minimum}: nothing more was charged; start the sites, then "
                    f"use {self.run.how_to_resume}"
                )
            self.sleep(_LOOK)


def check_recipe(recipe: Recipe) -> None:
    """Refuse recipes with parts that are for simulations only."""
    if recipe.attack is not None:
        raise BadInput("[attack] is for simulations: leave it out")
    if recipe.engine.checkpoint != 1:
        raise BadInput(
            f"engine.checkpoint is {recipe.engine.checkpoint}: over a federation every round that "
            "is lost is charged again, so a checkpoint is written after each; leave it out"
        )


def data_without_records(
    recipe: Recipe, federation: Federation, data_root: Path | None, run: str
) -> FederatedData:
    """The test split, with the federation's sites as clients and without any records.

    The data's fingerprint has the run's id in it. The server cannot know whether sites have the
    same records as in another run, and noise that two runs share would cancel in the difference of
    their models.
    """
    if federation.data is not None:
        recipe = recipe.model_copy(update={"data": federation.data})
    records = [site.records for site in federation.sites]
    data = data_of(recipe, data_root).at_sites(federation.names, records, run)
    return replace(data, remarks=(*data.remarks, CARRIED, ABSENT))
