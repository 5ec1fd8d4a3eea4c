"""Clients and their records: one array and client offsets. Tables, and texts."""

from fedveil.data.schema import TableSchema
from fedveil.data.user_arrays import pad
from fedveil.data.vocabulary import Vocabulary

__all__ = ["TableSchema", "Vocabulary", "pad"]
