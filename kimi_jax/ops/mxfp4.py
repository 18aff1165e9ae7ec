"""MXFP4: two E2M1 codes a byte (low nibble first) and one E8M0 scale byte for 32 numbers of the input axis.

A code's value is 0, 0.5, 1, 1.5, 2, 3, 4 or 6, bit 3 its sign; a scale byte s means 2^(s − 127).
Results are exact in float32 and bfloat16 for s in 2…252. At the ends of the range: s = 0 gives zeros
(2^-127 is no normal number), s = 1 flushes ±0.5·2^-126 to zero where the machine flushes subnormals,
s = 253 and 254 overflow to infinity for the codes that reach 2^128, and s = 255 is NaN (the OCP MX standard):
loading refuses it.
"""

import jax
import jax.numpy as jnp
import numpy as np
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


_SIZES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_SIZES, -_SIZES])


def quantize(x: Float[np.ndarray, "*lead I"]) -> tuple[UInt8[np.ndarray, "*lead J"], UInt8[np.ndarray, "*lead G"]]:
    """Rounds to MXFP4 on the host; returns packed codes and scales, `J = I / 2` and `G = I / 32`.

    Two exponents are tried for a group's scale: the one by which its largest magnitude lands in 4…8 (the OCP MX rule;
    past 6 it is cut), and the next, by which it lands in 2…4. The one with the smaller sum of squared errors is taken,
    of two equal ones the first, so that numbers which MXFP4 can hold come back as they are. A scale byte is from 1 to
    252; a group of zeros gets 127, a group with an infinity or NaN gets 255. Codes round to nearest, ties to even, and
    stop at ±6; the sign of a zero stays.
    """
    groups = np.asarray(x, np.float32).reshape((*x.shape[:-1], x.shape[-1] // GROUP, GROUP))
    size = np.abs(groups)
    peak = size.max(axis=-1)
    finite = np.isfinite(peak)
    size = np.where(finite[..., None], size, np.float32(0))
    scale = np.clip((peak.view(np.uint32) >> 23).astype(np.int32) - 2, 1, 252)
    codes, error = _nearest(size, scale)
    above = np.minimum(scale + 1, 252)
    codes_above, error_above = _nearest(size, above)
    # An error counts in units of its scale.
    better = error_above * np.where(above > scale, np.float32(4), np.float32(1)) < error
    codes = np.where(better[..., None], codes_above, codes) | (np.signbit(groups).astype(np.uint8) << 3)
    scale = np.where(better, above, scale)
    scale = np.where(peak == 0, 127, np.where(finite, scale, NAN_SCALE)).astype(np.uint8)
    codes = codes.reshape(x.shape)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale


def _nearest(
    size: Float[np.ndarray, "*lead G 32"], scale: Integer[np.ndarray, "*lead G"]
) -> tuple[UInt8[np.ndarray, "*lead G 32"], Float[np.ndarray, "*lead G"]]:
    """Codes of magnitudes, and the sum of squared errors of each group in units of its scale."""
    scaled = size * np.exp2(127 - scale).astype(np.float32)[..., None]
    # Midpoints of neighbouring values; at each tie the even code wins.
    codes = (scaled > 0.25).astype(np.uint8)
    for step in (scaled >= 0.75, scaled > 1.25, scaled >= 1.75, scaled > 2.5, scaled >= 3.5, scaled > 5):
        codes += step.view(np.uint8)
    scaled -= _SIZES[codes]
    return codes, np.einsum("...i,...i->...", scaled, scaled)


def dequantize_on_host(
    packed: UInt8[np.ndarray, "*lead J"], scale: UInt8[np.ndarray, "*lead G"]
) -> Float[np.ndarray, "*lead I"]:
    """What `dequantize` gives, in float32 by NumPy, which flushes nothing: exact for s from 1 to 252."""
    codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape((*scale.shape, GROUP))
    sizes = (scale.astype(np.uint32) << 23).view(np.float32)
    sizes = np.where(scale == NAN_SCALE, np.float32(np.nan), sizes)[..., None]
    with np.errstate(over="ignore"):
        return (_VALUES[codes] * sizes).reshape((*packed.shape[:-1], 2 * packed.shape[-1]))
