"""Ray: the same chunks on the nodes of a cluster. Nothing here imports ray before it is used."""
