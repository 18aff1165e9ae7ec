"""Facts of the devices that people plan for, as their makers publish them. 1 GB = 10⁹ bytes."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Device:
    """One chip: a GPU, or a TPU chip with all its cores.

    - `memory`: bytes of HBM. `bandwidth`: bytes of HBM read or written a second; None where not known.
    - `peak_flops`: dense bfloat16 operations a second, None where not known.
    - `jax_devices`: devices that JAX sees in it; each has an equal share of the memory.
    """

    name: str
    memory: int
    bandwidth: int | None = None
    peak_flops: int | None = None
    jax_devices: int = 1


DEVICES = (
    Device("v5p", 95 * 10**9, 2_770 * 10**9, 459 * 10**12),
    Device("v6e", 32 * 10**9, 1_640 * 10**9, 918 * 10**12),
    Device("TPU7x", 192 * 10**9, 7_370 * 10**9, 2_307 * 10**12, jax_devices=2),
    Device("H200", 141 * 10**9, 4_800 * 10**9, 989 * 10**12),
    Device("B200", 180 * 10**9, 8_000 * 10**9, 2_250 * 10**12),
    Device("B300", 288 * 10**9, 8_000 * 10**9, 2_250 * 10**12),
    Device("GB300", 288 * 10**9, 8_000 * 10**9, 2_500 * 10**12),
)


def find_device(name: str, memory: int | None = None) -> Device:
    """A device by name.

    **Arguments:**

    - `name`: in any case, with or without the maker: "B300", "NVIDIA b300", "TPU v5p".
    - `memory`: bytes, in place of the ones known. A device that is not known needs it, and has no bandwidth.

    **Raises:** `ValueError` for an unknown name without memory, or memory below 1 byte.
    """
    if memory is not None and memory < 1:
        raise ValueError(f"device {name!r}: the memory must be at least 1 byte, found {memory}")
    plain = name.casefold().removeprefix("nvidia ").removeprefix("tpu ").strip()
    for device in DEVICES:
        if device.name.casefold() == plain:
            return device if memory is None else replace(device, memory=memory)
    if memory is None:
        known = ", ".join(device.name for device in DEVICES)
        raise ValueError(f'device {name!r} is not known ({known}); give its memory too, like "{name} 80GB"')
    return Device(name, memory)
