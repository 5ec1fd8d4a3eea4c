"""Terms of a federation's secure sums, and the lengths of their messages, for server and sites."""

from collections.abc import Sequence
from hashlib import sha256

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedveil.flower.certificates import read_node_key
from fedveil.flower.messages import BytesForm, Forms
from fedveil.masking.sum_messages import SumTerms, vector_size
from fedveil.privacy.releases.secure_sum import SecureSum

_PER_SITE = 1024
"""More bytes than a statement, an agreement, or a site's keys with their signature take."""


def sum_terms(channel: SecureSum, keys: Sequence[str], plan: str, run: str, size: int) -> SumTerms:
    """Return the terms of a run's secure sums, of which every message has the digest.

    Server and sites each derive them from what they have themselves: the recipe and the sites'
    keys. Of the server's, a site takes the run's id alone.

    Args:
        channel: The secure sum of the plan.
        keys: The sites' public keys as in .pub files, in the order of their numbers.
        plan: The digest of the plan (`plan_digest`).
        run: The run's id.
        size: The number of words of a vector: parameters, and the statistic of an adaptive clip.
    """
    public = [
        read_node_key(key).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        for key in keys
    ]
    name = sha256(f"fedveil federation\n{plan}\n{run}".encode()).digest()
    return SumTerms(name, tuple(public), channel.threshold, channel.honest, size, channel.bits)


def step_forms(size: int, bits: int, sites: int) -> Forms:
    """Return the forms of a site's steps, of which the masked vector is the longest.

    It has `size` words of so many `bits`.
    """
    return {"content": BytesForm(_most(sites) + vector_size(size, bits))}


def sum_ask_forms(sites: int) -> Forms:
    """Return the forms of what a server sends beside the model: rosters, and its own steps."""
    return {
        "roster_message": BytesForm(_PER_SITE * (sites + 1)),
        "content": BytesForm(_most(sites)),
    }


def _most(sites: int) -> int:
    """Return an upper bound on the bytes of a message without its masked vector.

    A message has the statements of all sites, and the boxes or shares of one site.
    """
    return _PER_SITE * (sites + 1) + 32 * sites * sites
