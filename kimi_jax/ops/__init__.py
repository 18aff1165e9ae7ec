"""Pure functions on arrays: the arithmetic of the model, each with its formula and nothing else.

Letters in shapes and einsums: B batch, T tokens in this call, S cache length, D hidden, N heads, K key width,
V value width, Q query latent, C kv latent, R unrotated extra width, E experts, A experts chosen a token,
L routed latent width, F expert width, M rows of a grouped matmul, W vocabulary.
"""
