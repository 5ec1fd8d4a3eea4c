"""One round: local work on a cohort, the server, the loop, the engines."""
