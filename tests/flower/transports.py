"""Transports within a test: sites that behave, and sites that do not."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from fedveil.flower.messages import (
    Answer,
    Arrival,
    Forms,
    HeadAsk,
    Refusal,
    Reply,
    RoundAsk,
    ServerMessage,
)


class Answers(Protocol):
    """A site, or what stands in for one."""

    def answer(self, ask: ServerMessage) -> Reply: ...


Behaviour = Callable[["InProcess", ServerMessage, Reply], list[Arrival]]


class Killed(BaseException):
    """The end of a process, as far as a test in it can go: nothing is written after it."""


@dataclass
class InProcess:
    """Sites in this process, asked one after the other.

    `behaviour` changes what comes back from some sites, by name, and `signing` the same of their
    signatures of the server's ledger, when these are collected. `away` are not online; a `stop` in
    (round, site) raises `end` when that site is asked: Ctrl-C, or `Killed`.
    """

    sites: dict[str, Answers]
    behaviour: dict[str, Behaviour] = field(default_factory=dict)
    signing: dict[str, Behaviour] = field(default_factory=dict)
    head_asks: list[tuple[str, HeadAsk]] = field(default_factory=list)
    away: set[str] = field(default_factory=set)
    stop: tuple[int, str] | None = None
    end: type[BaseException] = KeyboardInterrupt
    asks: list[RoundAsk] = field(default_factory=list)
    sent: dict[str, list[Reply]] = field(default_factory=dict)
    now: float = 0.0
    slept: float = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds

    def online(self) -> frozenset[str]:
        return frozenset(self.sites) - self.away

    def ask(
        self, sites: Sequence[str], ask: RoundAsk, seconds: float, forms: Forms
    ) -> Iterator[Arrival]:
        self.asks.append(ask)
        yield from self.send(dict.fromkeys(sites, ask), seconds, forms)

    def send(
        self, messages: Mapping[str, ServerMessage], seconds: float, forms: Forms
    ) -> Iterator[Arrival]:
        for name, ask in messages.items():
            if name in self.away:
                continue
            if isinstance(ask, HeadAsk):
                self.head_asks.append((name, ask))
                reply = self.sites[name].answer(ask)
                sign = self.signing.get(name)
                yield from [Arrival(name, reply)] if sign is None else sign(self, ask, reply)
                continue
            if self.stop == (ask.round, name):
                raise self.end
            reply = self.sites[name].answer(ask)
            self.sent.setdefault(name, []).append(reply)
            behave = self.behaviour.get(name)
            yield from [Arrival(name, reply)] if behave is None else behave(self, ask, reply)


def changed(**changes: object) -> Behaviour:
    """A site whose answers have other parts than they should."""

    def behave(transport: InProcess, ask: ServerMessage, reply: Reply) -> list[Arrival]:
        assert isinstance(reply, Answer)
        parts = {key: new(reply) if callable(new) else new for key, new in changes.items()}
        return [Arrival(reply.site, replace(reply, **parts))]  # type: ignore[arg-type]

    return behave


def twice(transport: InProcess, ask: ServerMessage, reply: Reply) -> list[Arrival]:
    return [Arrival(reply.site, reply), Arrival(reply.site, reply)]


def dies(transport: InProcess, ask: ServerMessage, reply: Reply) -> list[Arrival]:
    return []


def replays(transport: InProcess, ask: ServerMessage, reply: Reply) -> list[Arrival]:
    """Its first answer, again and again."""
    return [Arrival(reply.site, transport.sent[reply.site][0])]


def late(transport: InProcess, ask: ServerMessage, reply: Reply) -> list[Arrival]:
    transport.now += 1e6
    return [Arrival(reply.site, reply)]


def unreadable(transport: InProcess, ask: ServerMessage, reply: Reply) -> list[Arrival]:
    return [Arrival(reply.site, "what it sent cannot be read")]


def refuses(transport: InProcess, ask: ServerMessage, reply: Reply) -> list[Arrival]:
    return [
        Arrival(
            reply.site, Refusal(ask.run, ask.round, ask.attempt, reply.site, "no budget is left")
        )
    ]


HOSTILE: dict[str, Behaviour] = {
    "nan": changed(report=lambda a: torch.full_like(a.report, torch.nan)),
    "length": changed(report=lambda a: a.report[:-1]),
    "matrix": changed(report=lambda a: a.report[None]),
    "scalar": changed(report=lambda a: a.report[0]),
    "dtype": changed(report=lambda a: a.report.double()),
    "whole": changed(report=lambda a: a.report.long()),
    "watched": changed(watched=torch.ones(7, dtype=torch.float64)),
    "name": changed(site="south"),
    "run": changed(run="0" * 32),
    "attempt": changed(attempt=5),
    "dies": dies,
    "replays": replays,
    "late": late,
    "unreadable": unreadable,
    "refuses": refuses,
}
