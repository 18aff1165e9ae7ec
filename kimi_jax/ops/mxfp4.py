"""MXFP4: two E2M1 codes a byte (low nibble first) and one E8M0 scale byte for 32 numbers of the input axis.

A code's value is 0, 0.5, 1, 1.5, 2, 3, 4 or 6, bit 3 its sign; a scale byte s means 2^(s − 127).
Results are exact in float32 and bfloat16 for s in 2…252. At the ends of the range: s = 0 gives zeros
(2^-127 is no normal number), s = 1 flushes ±0.5·2^-126 to zero where the machine flushes subnormals,
s = 253 and 254 overflow to infinity for the codes that reach 2^128, and s = 255 is NaN (the OCP MX standard):
loading refuses it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, UInt8

GROUP = 32
BYTES_OF_SCALE = GROUP // 2
"""Bytes of codes that share a scale."""
NAN_SCALE = 255


def unpack(packed: UInt8[Array, "*lead J"]) -> UInt8[Array, "*lead I"]:
    """The codes 0…15 of packed bytes, `I = 2·J`: element 2j is the low half of byte j."""
    codes = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    return codes.reshape((*packed.shape[:-1], 2 * packed.shape[-1]))


def pack(codes: UInt8[Array, "*lead I"]) -> UInt8[Array, "*lead J"]:
    """The inverse of `unpack`."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def code_values(codes: Integer[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The values of codes 0…15 as float32.

    A float32's fields are written from the code's: from 1 on (code 2) they agree but for the exponent's offset; of the
    two codes below that, 0 and 0.5, the one is no normal number. (A table of 16 numbers would be a gather.)
    """
    codes = codes.astype(jnp.int32)
    size = codes & 7
    normal = (size << 22) + (126 << 23)
    bits = jnp.where(size < 2, size * (126 << 23), normal) | ((codes & 8) << 28)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def scale_values(scale: Integer[Array, "*shape"]) -> Float[Array, "*shape"]:
    """2^(s − 127) as float32: the byte is a float32's exponent field, so that no arithmetic rounds it."""
    bits = scale.astype(jnp.int32) << 23
    return jnp.where(scale == NAN_SCALE, jnp.nan, jax.lax.bitcast_convert_type(bits, jnp.float32))


def dequantize(
    packed: UInt8[Array, "*lead J"], scale: UInt8[Array, "*lead G"], dtype: jnp.dtype
) -> Float[Array, "*lead I"]:
    """The numbers in `dtype`: `I = 2·J = 32·G` along the input axis."""
    values = code_values(unpack(packed))
    grouped = values.reshape((*scale.shape, GROUP)) * scale_values(scale)[..., None]
    return grouped.reshape(values.shape).astype(dtype)


def quantize(x: Float[Array, "*lead I"]) -> tuple[UInt8[Array, "*lead J"], UInt8[Array, "*lead G"]]:
    """Rounds to MXFP4 by the OCP MX rule; returns packed codes and scales.

    The scale's exponent is that of the group's largest magnitude less 2 (so that this lands in 4…6), not
    below 1; a group of zeros gets 127, a group with an infinity or NaN gets 255. Codes round to nearest, ties
    to even, and stop at ±6.
    """
    groups = x.astype(jnp.float32).reshape((*x.shape[:-1], x.shape[-1] // GROUP, GROUP))
    peak = jnp.max(jnp.abs(groups), axis=-1)
    exponent = jax.lax.bitcast_convert_type(peak, jnp.uint32) >> 23
    scale = jnp.clip(exponent.astype(jnp.int32) - 2, 1, 252)
    scale = jnp.where(peak == 0, 127, jnp.where(jnp.isfinite(peak), scale, NAN_SCALE)).astype(jnp.uint8)
    inverse = scale_values((254 - jnp.clip(scale, 1, 253)).astype(jnp.uint8))
    size = jnp.abs(groups) * inverse[..., None]
    # Midpoints of neighbouring values; at each tie the even code wins.
    above = [size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5]
    codes = sum(step.astype(jnp.uint8) for step in above) | (jnp.signbit(groups).astype(jnp.uint8) << 3)
    return pack(codes.reshape(x.shape)), scale
