"""Training: whole small models, and adapters on a packed base."""
