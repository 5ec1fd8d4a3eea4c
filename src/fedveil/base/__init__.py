"""What every other package builds on: errors, checks, identities, inputs, forks, platforms."""
