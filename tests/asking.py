"""What a round asks of clients, made by hand."""

import numpy as np

from fedveil.privacy.channel import Round
from fedveil.privacy.noise.streams import Streams


def asked(plan, start, ids, adaptive_state=None, round=1, streams=None):
    """Clients `ids` in `round` of the plan, from the model `start`."""
    moving = plan.first_state(start) if moving is None else moving
    ids, streams = np.asarray(ids), streams or Streams(1)
    return Round(round, ids, start, plan.clip(moving, round), moving, streams)
