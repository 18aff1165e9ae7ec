"""The `kimi-jax` command: one module a subcommand, a dataclass for its options."""
