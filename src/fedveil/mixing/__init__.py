"""The mixer: a party of its own between clients and server that hands on multisets only.

Clients send it two-valued reports, message by message; per round it keeps one count per position,
never an order or a time. While a round is open it knows which members were counted, because a
member counts once; when the round closes it forgets that. The server collects the multisets of a
closed round, which never change: asking twice gives the same answer and no difference to learn
from. A round opens at its first announcement. It closes when `expected` reports are complete, or
at its deadline with at least `minimum`; with fewer it is discarded, and nothing is handed on.

Protocol, over TCP or TLS, big-endian. One connection is one report or one question:

    hello    both      "FVM2R" to report or "FVM2C" to collect, positions u32, minimum u32 that the
                       sender relies on, round u64
    answer   mixer     status u8 (`Status`); anything but OK ends the connection
    frame    report    count u16 in [1, 4096], then count words u32 = 2 x position + (1 if high)
    answer   mixer     status u8 after the last message: OK means counted
    counts   collect   after OK: reports u32, then high u32 per position
    thanks   collect   u8 0: the counts have arrived

A report is buffered until every position has come exactly once, then counted as a whole or, if its
round has finished meanwhile, not at all. A connection that breaks, stalls, repeats a position or
sends anything malformed is closed and leaves no trace in any count. So every position has the same
number of reports, and `minimum` counts members (docs/proofs/mixer.md). The price is that the mixer
sees a client's messages together while they are coming in: it must be trusted to forget them. A
client whose connection breaks before the last answer cannot know whether it was counted and must
not repeat.

What it does NOT protect against:

- whoever watches the network: TLS hides what is sent and proves who the mixer is, and not who sends
  when; latency is not a shuffler (`fedveil.privacy.shuffle`). Run it behind an anonymity layer.
- a mixer that sides with the server: then only the claims without a shuffler hold.
- dishonest members beyond those that the plan counts on (`shuffle.dishonest`): whoever knows all
  reports but one knows the last. A member has one report per round, so each of them costs one.
- denial of service: sizes, rounds, connections and time are bounded, but a member may fill them, or
  open a round too early so that it expires.
"""
