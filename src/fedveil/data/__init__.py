"""Clients and their records: one array and client offsets."""
