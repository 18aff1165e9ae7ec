"""The loaded model: configuration, mesh, and parameters as plain nested dicts, split from the modules once."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from kimi_jax.config import ModelConfig
from kimi_jax.model.decoder import DecoderLayer
from kimi_jax.model.lora import AdapterSpec, attach_layer
from kimi_jax.model.segments import segments, stack_places
from kimi_jax.model.transformer import Transformer
from kimi_jax.parallel.sharding import Axes, array_sharding, on_mesh

Params = dict[str, Any]
"""Nested dicts; keys joined by '.' are the checkpoint's names without `language_model.` and `model.`."""


@dataclass(frozen=True)
class ModelSpec:
    """What a compiled function depends on besides its arrays; hashable.

    - `dtype`: of the computation. Stored parameters keep the checkpoint's.
    - `expert_strategy`: see `kimi_jax.parallel.expert_parallel`.
    - `loop`: whether the layers that repeat run as a loop over stacks of them; see `kimi_jax.model.segments`.
    - `dense_weights`: how most of the weights that are not experts are stored: "bf16" (as in the checkpoint), "int8"
        or "fp8"; see `kimi_jax.ops.rounding`.
    - `adapters`: which modules have low-rank adapters, see `kimi_jax.model.lora`; None for none.
    """

    config: ModelConfig
    mesh: Mesh | None
    dtype: jnp.dtype
    expert_strategy: str = "auto"
    loop: bool = False
    dense_weights: str = "bf16"
    adapters: AdapterSpec | None = None

    @cached_property
    def graphdef(self) -> nnx.GraphDef:
        """The modules without their parameters."""
        return nnx.split(Transformer(self.config, self.dtype, self.loop, self.dense_weights, self.adapters))[0]

    @cached_property
    def layer_keys(self) -> tuple[str, ...]:
        """The keys of `params["layers"]` in the layers' order: a layer's number, or the range of a stack."""
        return tuple(key for part in segments(self.config, self.loop) for key in part.keys)

    def module(self, params: Params) -> Transformer:
        """The modules over `params`; cheap enough while tracing, never called a step."""
        layers = {i: _as_state(params["layers"][key]) for i, key in enumerate(self.layer_keys)}
        return nnx.merge(self.graphdef, nnx.State(_as_state({**params, "layers": {}}) | {"layers": layers}))


@contextmanager
def computing(spec: ModelSpec) -> Iterator[None]:
    """While a function is traced: the mesh that constraints refer to, and full matmul precision above bfloat16."""
    precision = None if spec.dtype == jnp.bfloat16 else "highest"
    with on_mesh(spec.mesh, spec.expert_strategy), jax.default_matmul_precision(precision):
        yield


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A model ready to run.

    - `spec`: configuration, mesh and compute dtype.
    - `params`: see `Params`. Expert projections are stacked: `layers.3.block_sparse_moe.experts.w1.weight_packed`
        is `[E, F, L/2]`. With `spec.loop` layers are, too: `layers.4:89:4.…` has a leading axis of 22 layers.
    - `stop_ids`: ids that end a generation, from the configuration and the generation configuration.
    - `absent_layers`: layers that `load_model(layers=…)` left out; their parameters have shapes and no numbers.
    - `vision_tensors`: tensors of the vision tower and projector that the checkpoint holds and loading skipped.

    The module tree over the same arrays is `module`; its layers can be reached directly:
    `model.layers[3].self_attn.kv_a_proj_with_mqa`.
    """

    spec: ModelSpec
    params: Params
    stop_ids: tuple[int, ...] = ()
    vision_tensors: int = 0
    absent_layers: tuple[int, ...] = ()

    def __repr__(self) -> str:
        where = "one device" if self.mesh is None else f"mesh {dict(self.mesh.shape)}"
        return f"Model({self.config.architecture}, {self.config.num_layers} layers, {self.dtype.name}, on {where})"

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self.spec.config

    @property
    def mesh(self) -> Mesh | None:
        """The mesh it lies on; None for one device."""
        return self.spec.mesh

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the computation."""
        return self.spec.dtype

    @property
    def graphdef(self) -> nnx.GraphDef:
        """The modules without their parameters."""
        return self.spec.graphdef

    @cached_property
    def module(self) -> Transformer:
        """The module tree over the same arrays, for looking around; edits of it do not change `params`."""
        return self.spec.module(self.params)

    @property
    def layers(self) -> Sequence[DecoderLayer]:
        """The decoder layers, each over its own arrays; those of a stack are copied out of it when asked for."""
        return self.module.layers if not self.spec.loop else _Layers(self)

    @cached_property
    def identity(self) -> tuple[int, ...]:
        """Four uint32 numbers that tell this configuration and these weights from others, on every mesh.

        A digest of the configuration and of a sum over the bits of every parameter: the weights are read once.
        """
        digest = hashlib.sha256(repr(self.config).encode())
        leaves, stored, adapters = dict(flatten(self.params)), self.spec.dense_weights, self.spec.adapters
        sums: dict[str, str] = {}
        for key, (_, _, names) in param_layout(self.config, self.spec.loop, stored, adapters).items():
            # One after the other: hundreds of small all-reduces in flight starve each other on CPU devices.
            leaf = leaves[key]
            for i, name in enumerate(names):
                total = int(_bit_sum(leaf) if len(names) == 1 else _bit_sum_of(leaf, i))
                sums[name] = f"{leaf.dtype.name} {total}"
        for name, (struct, _) in abstract_params(self.config, stored, adapters).items():
            digest.update(f"{name} {struct.shape} {sums[name]}".encode())
        return tuple(int(word) for word in np.frombuffer(digest.digest()[:16], "<u4"))

    def replace(self, **changes: Any) -> "Model":
        """A copy with other fields, e.g. `model.replace(params=edited)`.

        **Raises:** `ValueError` naming the parameter where `params` lacks one, has one more, or one of another shape.
        """
        if "params" in changes:
            old, new = dict(flatten(self.params)), dict(flatten(changes["params"]))
            for name in {**old, **new}:
                found, wanted = (leaves[name].shape if name in leaves else None for leaves in (new, old))
                if found != wanted:
                    raise ValueError(f"parameter {name} has the shape {found}, the model wants {wanted}")
        return replace(self, **changes)


@jax.jit
def _bit_sum(x: Array) -> Array:
    """Sum of an array's bit patterns, each weighted by its place, modulo 2³²; the same on every mesh."""
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    flat = bits.reshape(-1)
    return jnp.sum(flat * (2 * jnp.arange(flat.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


@jax.jit
def _bit_sum_of(stack: Array, layer: Array | int) -> Array:
    """`_bit_sum` of one layer of a stack: of all at once, a device would hold the whole stack."""
    return _bit_sum(jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False))


class _Layers(Sequence[DecoderLayer]):
    """The layers of a model that runs some as a loop."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __len__(self) -> int:
        return self.model.config.num_layers

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        layer = range(len(self))[number]
        key, at = stack_places(self.model.config, True)[layer]
        own = self.model.params["layers"][key]
        own = own if at is None else jax.tree.map(lambda x: x[at], own)
        module = DecoderLayer(self.model.config, layer, self.model.spec.dense_weights)
        if self.model.spec.adapters is not None:
            attach_layer(module, self.model.spec.adapters, [layer])
        return nnx.merge(nnx.split(module)[0], nnx.State(_as_state(own)))


@cache
def param_layout(
    config: ModelConfig, loop: bool, dense_weights: str, adapters: AdapterSpec | None
) -> dict[str, tuple[jax.ShapeDtypeStruct, Axes, tuple[str, ...]]]:
    """Shape and dtype, and logical axes, of every array of `params`; and the names of the parameters that it holds."""
    places = stack_places(config, loop)
    layout: dict[str, tuple[jax.ShapeDtypeStruct, Axes, tuple[str, ...]]] = {}
    for name, (struct, axes) in abstract_params(config, dense_weights, adapters).items():
        head, _, tail = name.partition(".")
        layer, _, rest = tail.partition(".")
        key, at = places[int(layer)] if head == "layers" else ("", None)
        if at is None:
            layout[name] = struct, axes, (name,)
            continue
        stack = f"{head}.{key}.{rest}"
        names = (*(layout[stack][2] if stack in layout else ()), name)
        layout[stack] = jax.ShapeDtypeStruct((len(names), *struct.shape), struct.dtype), (None, *axes), names
    return layout


def placed_layout(spec: ModelSpec) -> dict[str, tuple[jax.ShapeDtypeStruct, tuple[str, ...]]]:
    """Shape, dtype and sharding of every array of `params`, adapters among them; and the parameters that it holds."""
    layout = param_layout(spec.config, spec.loop, spec.dense_weights, spec.adapters)
    return {
        key: (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=array_sharding(key, x.shape, axes, spec.mesh)), names)
        for key, (x, axes, names) in layout.items()
    }


def abstract_params(
    config: ModelConfig, dense_weights: str = "bf16", adapters: AdapterSpec | None = None
) -> dict[str, tuple[jax.ShapeDtypeStruct, Axes]]:
    """Every parameter by its dotted name: shape and dtype, and logical axes. Nothing is allocated.

    They are the published ones, but for what `dense_weights` "int8" or "fp8" rounds and the scales beside it, and for
    adapters.
    """
    return _declared(config, dense_weights, adapters)


@cache  # here, where all arguments are given: a default and the same value written out would be two entries
def _declared(
    config: ModelConfig, dense_weights: str, adapters: AdapterSpec | None
) -> dict[str, tuple[jax.ShapeDtypeStruct, Axes]]:
    state = nnx.split(Transformer(config, jnp.dtype(jnp.bfloat16), False, dense_weights, adapters))[1]
    flat = nnx.to_flat_state(state)
    return {".".join(str(key) for key in path): (leaf.get_value(), leaf.axes) for path, leaf in flat}


def nest(flat: Mapping[str, Any]) -> Params:
    """Nested dicts from dotted names."""
    tree: Params = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = value
    return tree


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Array]]:
    """Dotted names and leaves of nested dicts: the inverse of `nest`."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _as_state(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _as_state(value) if isinstance(value, Mapping) else nnx.Param(value) for key, value in tree.items()}
