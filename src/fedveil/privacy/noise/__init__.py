"""Noise: mechanisms on rows, seeded streams, and secure randomness on a grid."""
