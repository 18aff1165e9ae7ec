"""Arithmetic about models and machines, without either: counts, bytes, what fits."""
