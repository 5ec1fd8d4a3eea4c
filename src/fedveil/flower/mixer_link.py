"""The TLS connection to the mixer, by which a site reports and the server collects."""

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.mixing.client import collect, send_report
from fedveil.mixing.protocol import Refused, Status
from fedveil.mixing.tls import connecting
from fedveil.privacy.shuffle import Flags, Multisets
from fedveil.runs.sections.section import Section

_LOOK = 0.2  # seconds from one look at the mixer to the next

T = TypeVar("T")


class MixerSection(Section):
    """`[mixer]`: where reports go for a recipe with `[shuffle]`."""

    host: str = Field(description="Its host, as its certificate names it.")
    port: int = Field(description="Its port.")
    ca: str | None = Field(
        default=None,
        description="File with the certificate of the authority that signed the mixer's. Left "
        "out: those that this machine trusts.",
    )
    certificate: str | None = Field(
        default=None,
        description="The certificate by which the mixer knows this site or the server. Default: "
        "none, which a mixer takes in simulations only.",
    )
    key: str | None = Field(
        default=None, description="The private key of that certificate. Default: none."
    )
    spread: float = Field(
        default=0.0, description="Seconds over which a site spreads the messages of a report."
    )
    insecure: bool = Field(
        default=False, description="Whether to do without TLS: for tests on one machine."
    )

    def check(self) -> None:
        """Refuse what no mixer can be reached by."""
        if not 1 <= self.port < 2**16:
            raise BadInput(f"mixer.port is {self.port}: 1 to 65535 is needed")
        if not 0 <= self.spread <= 3600:
            raise BadInput(f"mixer.spread is {self.spread}: seconds, up to an hour, are needed")
        if self.insecure and (self.ca or self.certificate or self.key):
            raise BadInput("mixer.insecure is true beside certificates: leave one out")
        if self.insecure and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise BadInput(
                f"mixer.insecure is true and mixer.host is {shown(self.host)}: without TLS a mixer "
                "is for tests on one machine"
            )

    def beside(self, folder: Path) -> "MixerSection":
        """The same with paths that are relative to `folder` made absolute."""
        files = {name: getattr(self, name) for name in ("ca", "certificate", "key")}
        changes = {name: str(folder / file) for name, file in files.items() if file is not None}
        return self.model_copy(update=changes)


@dataclass(frozen=True)
class MixerLink:
    """A connection to one mixer.

    Guarantee: without `insecure`, nothing is sent unless the peer has a certificate of the host
    that the authority has signed.
    """

    section: MixerSection

    def report(self, number: int, high: Flags, minimum: int) -> None:
        """Send the bits `high` [P] of one report. Raises `Refused` if the mixer does not count it.

        A mixer that hands on fewer than `minimum` reports gets none. A report is never sent
        again: a mixer that broke off may have counted it.
        """
        place, spread, tls = self._place, self.section.spread, self._tls
        _run(lambda: send_report(*place, number, high, minimum=minimum, spread=spread, tls=tls))

    def collected(
        self,
        number: int,
        positions: int,
        minimum: int,
        until: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> Multisets | None:
        """Collect a round's multisets. None if it was discarded, or is still open at `until`."""
        place, tls = self._place, self._tls
        while True:
            try:
                return _run(lambda: collect(*place, number, positions, minimum=minimum, tls=tls))
            except Refused as e:
                if e.status not in (Status.OPEN, Status.LOST) or clock() >= until:
                    return None
            sleep(_LOOK)

    @property
    def _place(self) -> tuple[str, int]:
        return self.section.host, self.section.port

    @property
    def _tls(self) -> ssl.SSLContext | None:
        section = self.section
        if section.insecure:
            return None
        return connecting(section.ca, section.certificate, section.key)


def _run(conversation: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """In a thread of its own: whoever calls may be inside a loop already."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: asyncio.run(conversation())).result()
