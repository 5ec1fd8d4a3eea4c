"""How many rounds, how many local steps: theory, search and sweeps."""
