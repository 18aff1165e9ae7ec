"""The whole language model."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.config import ModelConfig
from kimi_jax.model.cache import Cache, LayerCache
from kimi_jax.model.call import make_call
from kimi_jax.model.decoder import DecoderLayer
from kimi_jax.model.layers import Embedding, Linear, Norm, project
from kimi_jax.model.loop import Choices, Observer, run_layer, run_loop
from kimi_jax.model.lora import AdapterSpec, attach_layer
from kimi_jax.model.parts import part as named
from kimi_jax.model.segments import Segment, segments
from kimi_jax.ops.attn_res import Bank, empty_bank, mix_query, mix_residuals
from kimi_jax.ops.norms import wide_dtype
from kimi_jax.parallel.sharding import Axes, constrain, divided


class Output(NamedTuple):
    """What a forward call leaves: the input of `norm`, the caches as they lie in `Cache.layers`, what was observed.

    Without a cache there are no caches; `observed` has an entry a layer, in order, or with no observer none.
    """

    final_hidden: Array
    caches: tuple[LayerCache, ...]
    observed: tuple[Any, ...]


class Transformer(nnx.Module):
    """Embedding, decoder layers, final mix and norm, head. Attribute names are the checkpoint's.

    `layers` has an entry a layer; with `loop`, one for each stack of layers that run as a loop: see
    `kimi_jax.model.segments`. The arrays of such an entry have the rounds as their first axis. `dense_weights` is how
    the projections of attention, dense and shared MLP and head are stored, as `Linear` takes it; `adapters` which
    modules have low-rank adapters.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        loop: bool = False,
        dense_weights: str = "bf16",
        adapters: AdapterSpec | None = None,
    ) -> None:
        self.segments = segments(config, loop)
        self.embed_tokens = Embedding(config)
        first = [part.first + place for part in self.segments for place in range(part.period)]
        self.layers = nnx.List([DecoderLayer(config, i, dense_weights) for i in first])
        self.norm = Norm(config.hidden_size, config.norm_eps)
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm = Norm(config.hidden_size, config.norm_eps)
            self.output_attn_res_proj = Linear(1, config.hidden_size, adaptable=False)
        if not config.tie_embeddings:
            self.lm_head = Linear(config.vocab_size, config.hidden_size, ("vocab", None), dense_weights)
        self.config = config
        self.dtype = dtype
        if adapters is not None:
            self._attach(adapters)

    def _attach(self, adapters: AdapterSpec) -> None:
        """Gives its modules their adapters, in place."""
        done: set[str] = set()
        for part, entries in self._parts():
            for place, layer in enumerate(self.layers[entries]):
                done |= attach_layer(layer, adapters, part.layers(place))
        if "lm_head" in adapters.by_name and not self.config.tie_embeddings:
            self.lm_head.add_adapter(*adapters.by_name["lm_head"], "lm_head")
            done.add("lm_head")
        wrong = set(adapters.by_name) - done
        if wrong:
            raise ValueError(f"adapter of {min(wrong)!r}: the model has no such module that can have one")

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        cache: Cache | None = None,
        choice: Choices | None = None,
        observe: Observer | None = None,
        remat: bool = False,
        first: Int[Array, "B T"] | None = None,
    ) -> Output:
        """Runs the layers over right-padded tokens.

        **Arguments:**

        - `tokens`: ids; `lengths`: real tokens of each row in this call.
        - `cache`: what came before, None for nothing and no cache.
        - `choice`: expert numbers by 0-based layer, in place of the router's own.
        - `observe`: what to keep of a layer's trace, e.g. `lambda trace: trace.router_index`; None keeps nothing.
        - `remat`: whether a backward pass computes each layer again instead of keeping what happens inside.
        - `first`: where rows hold several documents one after the other, the place in its row where each token's
            document begins: no token knows of another document. None for one a row. Only without a cache.

        **Raises:** `ValueError` for `first` with a cache.
        """
        call = make_call(tokens.shape[1], lengths, None if cache is None else cache.lengths, first)
        with named("embedding"):
            prefix = self.embed_tokens(tokens, self.dtype)
        bank = self._empty_bank(prefix)
        given = choice or {}
        caches: list[LayerCache] = []
        observed: list[Any] = []
        for part, entries in self._parts():
            layers = self.layers[entries]
            before = None if cache is None else cache.layers[entries]
            if part.rounds > 1:
                prefix, bank, after, found = run_loop(part, layers, prefix, bank, call, before, given, observe, remat)
            else:
                own = None if before is None else before[0]
                chosen = given.get(part.first)
                prefix, bank, after, found = run_layer(
                    part.first, layers[0], prefix, bank, call, own, chosen, observe, remat
                )
            observed += found
            if cache is not None:
                caches += after
        if bank is not None:
            with named("residuals"):
                prefix = mix_residuals(prefix, bank, 2 * self.config.num_layers, self.config.norm_eps)
        return Output(prefix, tuple(caches), tuple(observed))

    def _parts(self) -> Iterator[tuple[Segment, slice]]:
        """Each segment, and where its entries stand in `layers` and in a cache."""
        entry = 0
        for part in self.segments:
            yield part, slice(entry, entry + part.period)
            entry += part.period

    def _empty_bank(self, prefix: Array) -> Bank | None:
        block = self.config.attn_res_block_size
        if block is None:
            return None
        queries = []
        for _, entries in self._parts():
            each = [layer.mix_queries() for layer in self.layers[entries]]
            # Of a loop, round by round; of one layer, its two.
            queries.append(jnp.stack(each, axis=-3).reshape((-1, prefix.shape[-1])))
        queries.append(mix_query(self.output_attn_res_norm.weight[...], self.output_attn_res_proj.weight[...])[None])
        bank = empty_bank(-(-self.config.num_layers // block), prefix, jnp.concatenate(queries))
        rows: Axes = ("batch", divided("tokens", prefix.shape[1]))
        return bank._replace(
            sums=constrain("bank", bank.sums, (None, *rows, None)),
            scores=constrain("bank scores", bank.scores, (None, None, *rows)),
        )

    def logits(self, final_hidden: Float[Array, "*lead D"]) -> Float[Array, "*lead W"]:
        """`lm_head(norm(h))` in float32 at least, over the axis "vocab"."""
        with named("head"):
            h = self.norm(final_hidden)
            wide = wide_dtype(h.dtype)
            tied = self.config.tie_embeddings
            out = project(h, self.embed_tokens.weight[...], wide) if tied else self.lm_head(h, wide)
        return constrain("logits", out, ("batch", *(None,) * (out.ndim - 2), "vocab"))
