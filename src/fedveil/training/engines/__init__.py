"""Engines: where a cohort's work runs, never what it computes."""
