"""Canaries and scores: lower bounds on epsilon, beside the claim."""
