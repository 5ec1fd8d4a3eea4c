"""Gradients of many clients at once: one file per way, and one that chooses."""
