"""Clients that attack a training, and what comes of it, beside the claim."""
