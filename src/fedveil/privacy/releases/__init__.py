"""Ways to release what clients send: one file each, with its builder, its noise and its lines."""
