"""All parties of a secure sum in one process, and copies of them that forget their journals."""

import copy
import os
from dataclasses import replace
from functools import cache

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedveil.masking.journal import Journal
from fedveil.masking.masking_site import MaskingSite
from fedveil.masking.sum_messages import Place, SumTerms
from fedveil.masking.sum_server import SumServer

ANY = 2**63
"""A limit that every sum keeps to."""


@cache
def node_key(site):
    return ec.generate_private_key(ec.SECP384R1())


def public(key):
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


class Parties:
    def __init__(self, sites, threshold, honest=None, words=4, run=None, bits=64):
        keys = [node_key(site) for site in range(sites)]
        honest = sites if honest is None else honest
        run = os.urandom(32) if run is None else run
        self.terms = SumTerms(run, tuple(map(public, keys)), threshold, honest, words, bits)
        self.journals = [Journal() for _ in keys]
        self.sites = [self.restarted(site) for site in range(sites)]
        self.server = SumServer(self.terms)
        for site in self.sites:
            self.server.add_advert(site.advert)

    def restarted(self, site):
        return MaskingSite(self.terms, site, node_key(site), self.journals[site])

    def vectors(self, seed=0):
        draw = np.random.default_rng(seed)
        size = (self.terms.sites, self.terms.words)
        return draw.integers(-(2**63), 2**63 - 1, size=size, dtype=np.int64, endpoint=True)

    def masked(self, vectors, round=1, attempt=0):
        """The messages of a round in which every site of the roster masks, by site."""
        roster = self.server.open(Place(round, attempt))
        messages = {}
        for site in list(self.server._adverts):
            self.sites[site].begin(roster)
            messages[site] = self.sites[site].mask(vectors[site])
        return messages

    def finish(self, messages, agreeing=None, revealing=None):
        """The sum of the vectors in `messages`, with these sites at the later steps."""
        for message in messages.values():
            self.server.add_masked(message)
        closings = self.server.close()
        if self.server.needs_agreement:
            for site in closings if agreeing is None else agreeing:
                self.server.add_agreed(self.sites[site].answer(closings[site]))
            certificate = self.server.certify()
            for site in closings if revealing is None else revealing:
                self.server.add_reveal(self.sites[site].reveal(certificate))
        else:
            for site in closings if revealing is None else revealing:
                self.server.add_reveal(self.sites[site].answer(closings[site]))
        return self.server.sum(ANY)

    def copied(self):
        """The same parties in the same state, with empty journals: a world of its own."""
        other = copy.copy(self)
        other.sites = [copied_site(site) for site in self.sites]
        other.server = copied_server(self.server)
        return other


def copied_site(site):
    other = copy.copy(site)
    other._journal = Journal()
    other._now = None if site._now is None else replace(site._now)
    return other


def copied_server(server):
    other = copy.copy(server)
    other._adverts = dict(server._adverts)
    if server._now is not None:
        now = server._now
        other._now = replace(
            now,
            masked_sum=now.masked_sum.copy(),
            statements=dict(now.statements),
            boxes=dict(now.boxes),
            agreed=dict(now.agreed),
            revealed=dict(now.revealed),
        )
    return other


def modular_sum(vectors):
    return vectors.astype(np.uint64).sum(axis=0, dtype=np.uint64).astype(np.int64)
