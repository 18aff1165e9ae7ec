"""Models of two layers, KDA with a dense MLP and MLA with experts (and indexer): one of each kind, quick to compile."""

from dataclasses import replace

from kimi_jax.model.model import Model


def two_layers(model: Model) -> Model:
    """The first layer of a tiny model and its first of MLA, with a block of Attention Residuals each."""
    config = model.config
    mla = config.layer_kinds.index("mla")
    small = replace(config, layer_kinds=("kda", "mla"))
    if config.indexer is not None:
        small = replace(small, indexer=replace(config.indexer, layers=(1,)))
    if config.attn_res_block_size is not None:
        small = replace(small, attn_res_block_size=1)
    layers = {"0": model.params["layers"]["0"], "1": model.params["layers"][str(mla)]}
    return replace(model, spec=replace(model.spec, config=small), params={**model.params, "layers": layers})
