"""The secure sum: a server learns the sum of its sites' integer vectors, and nothing else of them.

Bonawitz et al. (2017) on the full graph, for sites that know each other's node keys. Bytes come in
and bytes go out: what carries them is somebody else's. One round, where R are the sites of the
roster, S those whose vectors count:

    SumServer.open       -> roster       to every site of R
    MaskingSite.begin    <- roster       refused unless it is new and signed by the node keys
    MaskingSite.mask     -> masked       the vector under masks, and shares of this round's seeds
    SumServer.close      -> closings     one for each site of S
    MaskingSite.answer   -> reveal if S is R, and otherwise agreed
    SumServer.certificate-> certificate  to every site of S, once enough of them agreed
    MaskingSite.reveal   -> reveal
    SumServer.sum

Below the threshold, at any step, there is no sum. A site writes to its `Journal` what it is going
to answer before it does, and never answers otherwise. What each party learns, and why, is in
docs/proofs/secure-sum.md.
"""
