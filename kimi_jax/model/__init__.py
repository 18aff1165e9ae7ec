"""The flax.nnx module tree, with the checkpoint's names, and the cache it reads and writes."""
