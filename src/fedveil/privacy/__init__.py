"""Everything a privacy claim depends on, and nothing else."""
