"""What a round of the secure sum costs a site and the server: the table in docs/scale.md.

python benchmarks/secure_sum.py

Times are seconds of a core (CPU time). Site 0 does all that a site does. The others' shares are
random bytes, which cost nothing to make and as much as real ones to send, open and combine. The
server adds one vector, which counts n times, and opens the masks of n sites.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedveil.masking import masking_site
from fedveil.masking.journal import Journal
from fedveil.masking.masking_site import MaskingSite
from fedveil.masking.masks import add_masks_, deal
from fedveil.masking.sum_messages import Place, SumTerms
from fedveil.masking.sum_server import SumServer

SITES, PARAMETERS, FEW = (3, 10, 30, 100), (10**3, 10**4, 10**5, 10**6, 10**7), 1000
ANY = 2**63


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """(CPU seconds of a call, its result)."""
    began = time.process_time()
    result = call()
    return time.process_time() - began, result


class World:
    """The parties of a round with vectors of `words`."""

    def __init__(self, sites: int, words: int) -> None:
        keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(sites)]
        public = tuple(
            key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
            for key in keys
        )
        self.terms = SumTerms(os.urandom(32), public, sites // 2 + 1, sites, words)
        self.sites = [MaskingSite(self.terms, n, key, Journal()) for n, key in enumerate(keys)]
        self.server = SumServer(self.terms)
        for site in self.sites:
            self.server.add_advert(site.advert)
        self.roster = self.server.open(Place(1))


def fixed(sites: int, missing: int) -> dict[str, float]:
    """What does not depend on the number of parameters, with `missing` dropouts."""
    world = World(sites, FEW)
    server, vector = world.server, np.zeros(FEW, dtype=np.int64)
    keys, _ = seconds(lambda: world.sites[0].begin(world.roster))
    masking_site.deal = lambda seed, least, holders: [os.urandom(32) for _ in range(holders)]
    for number, site in enumerate(world.sites[: sites - missing]):
        if number:
            site.begin(world.roster)
        server.add_masked(site.mask(vector))
    masking_site.deal = deal
    closings = server.close()
    answering, answer = seconds(lambda: world.sites[0].answer(closings[0]))
    answers = {n: world.sites[n].answer(closing) for n, closing in closings.items() if n}
    answers[0] = answer
    revealing, up, down = 0.0, len(answer), len(world.roster) + len(closings[0])
    if missing:
        for each in answers.values():
            server.add_agreed(each)
        certificate = server.certificate()
        revealing, answer = seconds(lambda: world.sites[0].reveal(certificate))
        answers = {n: world.sites[n].reveal(certificate) for n in closings}
        up, down = up + len(answer), down + len(certificate)
    for each in answers.values():
        server.add_reveal(each)
    opening, _ = seconds(lambda: server.sum(ANY))
    later = answering + revealing
    return {"first keys": keys, "later": later, "opening": opening, "up": up, "down": down}


def by_size(sites: int, words: int) -> dict[str, float]:
    """Masking by site 0, and what the server does with vectors of this length."""
    world, vector = World(sites, words), np.zeros(words, dtype=np.int64)
    world.sites[0].begin(world.roster)
    masking, message = seconds(lambda: world.sites[0].mask(vector))
    adding, _ = seconds(lambda: world.server.add_masked(message))
    total, seeds = np.zeros(words, dtype=np.uint64), [os.urandom(32) for _ in range(sites)]
    unmasking, _ = seconds(lambda: add_masks_(total, [], seeds))
    return {"mask": masking, "sent": len(message), "server": sites * adding + unmasking}


def main() -> None:
    """Print both tables."""
    print(
        "| sites | dropouts | keys, once | answers of a site | opening at the server | up | down |"
    )
    print("|---|---|---|---|---|---|---|")
    opening = {}
    for sites in SITES:
        for missing in (0, 1):
            cost = fixed(sites, missing)
            opening.setdefault(sites, cost["opening"])
            times = [f"{cost[name]:.2g} s" for name in ("first keys", "later", "opening")]
            sizes = [f"{cost[name] / 1000:,.3g} kB" for name in ("up", "down")]
            print(f"| {sites} | {missing} |", " | ".join([*times, *sizes]), "|", flush=True)
    print("\n| sites | parameters | a site masks | a site sends | server, all sites |")
    print("|---|---|---|---|---|")
    for sites in SITES:
        for words in PARAMETERS:
            cost = by_size(sites, words)
            whole = cost["server"] + opening[sites]
            print(
                f"| {sites} | {words:,} | {cost['mask']:.2g} s | {cost['sent'] / 1e6:,.3g} MB | "
                f"{whole:.2g} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
