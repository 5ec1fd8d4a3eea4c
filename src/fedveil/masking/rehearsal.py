"""`rehearse`: a whole secure sum in one process, over the messages that would be sent."""

import os
from collections.abc import Sequence

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedveil.masking.journal import Journal
from fedveil.masking.masking_site import MaskingSite
from fedveil.masking.masks import Steps
from fedveil.masking.sum_messages import WIDE, Place, SumTerms
from fedveil.masking.sum_server import SumServer


def rehearse(
    vectors: Sequence[Steps | None], threshold: int, honest: int, limit: int, bits: int = WIDE
) -> Steps:
    """The sum of the sites' vectors, int64 [P] each, by the protocol with new keys for all parties.

    It is modulo 2^bits, as numbers around 0. A site without a vector (None) drops out after the
    roster. Raises what `SumTerms` and `SumServer` raise, and BadInput without any vector.

    >>> import numpy as np
    >>> rehearse([np.array([site, -site]) for site in (1, 2, 3)], 2, 3, limit=100).tolist()
    [6, -6]
    """
    node_keys = [ec.generate_private_key(ec.SECP384R1()) for _ in vectors]
    public = [
        key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        for key in node_keys
    ]
    words = max((len(vector) for vector in vectors if vector is not None), default=0)
    terms = SumTerms(os.urandom(32), tuple(public), threshold, honest, words, bits)
    server = SumServer(terms)
    sites = [MaskingSite(terms, site, key, Journal()) for site, key in enumerate(node_keys)]
    for site in sites:
        server.add_advert(site.advert)
    roster = server.open(Place(1))
    for site, vector in zip(sites, vectors, strict=True):
        site.begin(roster)
        if vector is not None:
            server.add_masked(site.mask(vector))
    closings = server.close()
    answers = {site: sites[site].answer(closing) for site, closing in closings.items()}
    if server.needs_agreement:
        for answer in answers.values():
            server.add_agreed(answer)
        certificate = server.certify()
        answers = {site: sites[site].reveal(certificate) for site in closings}
    for answer in answers.values():
        server.add_reveal(answer)
    return server.sum(limit)
