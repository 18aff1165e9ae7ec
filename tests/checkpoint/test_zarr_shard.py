"""Shards against tensorstore, which reads them by the format's own rules."""

import numpy as np
import pytest
import tensorstore as ts

from kimi_jax.checkpoint.zarr_shard import sharded, write_shard


def written(folder, array, shard, chunks):
    """A tensorstore over the shards of `array`."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    spec |= {"metadata": sharded(array.shape, shard, chunks), "dtype": array.dtype.name}
    ts.open(spec, create=True, open=False).result()
    rest = ["0"] * (array.ndim - 1)
    for number, row in enumerate(range(0, array.shape[0], shard[0])):
        write_shard(folder.joinpath("c", str(number), *rest), array[row : row + shard[0]], shard, chunks)
    return ts.open(spec | {"fill_missing_data_reads": False}, open=True, read=True).result()


@pytest.mark.parametrize(
    ("shape", "shard", "chunks"),
    [
        ((6, 4, 8), (2, 4, 8), (1, 4, 8)),
        ((7, 4, 8), (3, 4, 8), (1, 4, 8)),  # two of the last shard's chunks lie outside the array
        ((7, 12), (4, 12), (2, 4)),  # columns cut, and a last chunk of one row
        ((5,), (4,), (2,)),
        ((3, 5), (3, 6), (3, 2)),  # chunks do not divide the columns
    ],
)
@pytest.mark.parametrize("dtype", ["uint8", "float32", "bfloat16"])
def test_tensorstore_reads_what_was_written(tmp_path, shape, shard, chunks, dtype):
    array = np.random.default_rng(0).integers(1, 100, shape).astype(ts.dtype(dtype).numpy_dtype)
    np.testing.assert_array_equal(written(tmp_path, array, shard, chunks).read().result(), array)


@pytest.mark.parametrize("place", [3, 36, -10])  # in each of two chunks, and in the index behind them
def test_one_changed_bit_is_an_error(tmp_path, place):
    array = np.arange(64, dtype=np.uint8).reshape(2, 32)
    store, path = written(tmp_path, array, (2, 32), (1, 32)), tmp_path / "c" / "0" / "0"
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"(?i)digest|checksum|CRC"):
        store.read().result()


def test_rows_may_be_a_view_with_gaps(tmp_path):
    array = np.arange(2 * 40, dtype=np.uint8).reshape(2, 40)[:, ::2]
    np.testing.assert_array_equal(written(tmp_path, array, (2, 20), (1, 10)).read().result(), array)
