"""One safetensors file: every byte of it is accounted for by its header, or it is refused."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from kimi_jax.checkpoint.safetensors_file import SafetensorsFile
from kimi_jax.checkpoint.storage import CheckpointError

A = {"dtype": "U8", "shape": [2, 2], "data_offsets": [0, 4]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}
DATA = bytes([1, 2, 3, 4]) + struct.pack("<2f", 0.5, -2.0)

# The number 1 in every dtype of the format, written by hand.
ONES = {
    "F64": (np.float64, struct.pack("<d", 1.0)),
    "F32": (np.float32, struct.pack("<f", 1.0)),
    "F16": (np.float16, b"\x00\x3c"),
    "BF16": (ml_dtypes.bfloat16, b"\x80\x3f"),
    "F8_E4M3": (ml_dtypes.float8_e4m3fn, b"\x38"),
    "F8_E5M2": (ml_dtypes.float8_e5m2, b"\x3c"),
    "F8_E8M0": (ml_dtypes.float8_e8m0fnu, b"\x7f"),
    "I64": (np.int64, struct.pack("<q", 1)),
    "I32": (np.int32, struct.pack("<i", 1)),
    "I16": (np.int16, struct.pack("<h", 1)),
    "I8": (np.int8, b"\x01"),
    "U64": (np.uint64, struct.pack("<Q", 1)),
    "U32": (np.uint32, struct.pack("<I", 1)),
    "U16": (np.uint16, struct.pack("<H", 1)),
    "U8": (np.uint8, b"\x01"),
    "BOOL": (np.bool_, b"\x01"),
}


@pytest.fixture
def write(tmp_path):
    """`write(header, data)`: a file with this header (an object, or its bytes)."""

    def make(header, data=DATA, length=None):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / "part.safetensors"
        path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
        return path

    return make


def message(path) -> str:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def check_content(file):
    assert file.tensors.keys() == {"a", "b"}
    np.testing.assert_array_equal(file.read("a"), np.array([[1, 2], [3, 4]], np.uint8), strict=True)
    np.testing.assert_array_equal(file.read("b"), np.array([0.5, -2.0], np.float32), strict=True)


@pytest.mark.parametrize(
    ("header", "metadata"),
    [
        ({}, {}),
        ({"__metadata__": {}}, {}),
        ({"__metadata__": None}, {}),
        ({"__metadata__": {"format": "pt"}}, {"format": "pt"}),
        ({"__metadata__": {"notes": "x" * 1_000_000}}, {"notes": "x" * 1_000_000}),
    ],
    ids=["none", "empty", "null", "format", "megabyte"],
)
def test_metadata_is_no_tensor(write, header, metadata):
    file = SafetensorsFile(write(header | {"a": A, "b": B}))
    check_content(file)
    assert file.metadata == metadata


@pytest.mark.parametrize("spaces", [1, 7, 4096])
def test_header_padded_with_spaces(write, spaces):
    check_content(SafetensorsFile(write(json.dumps({"a": A, "b": B}).encode() + b" " * spaces)))


def test_order_of_the_header_is_not_the_order_of_the_data(write):
    check_content(SafetensorsFile(write({"b": B, "a": A})))


@pytest.mark.parametrize("dtype", ONES)
def test_every_dtype_with_empty_and_scalar_tensors(write, dtype):
    kind, one = ONES[dtype]
    size = len(one)
    header = {
        "odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},  # what follows is not aligned
        "scalar": {"dtype": dtype, "shape": [], "data_offsets": [1, 1 + size]},
        "empty": {"dtype": dtype, "shape": [0, 3], "data_offsets": [1, 1]},  # begins where the scalar does
        "pair": {"dtype": dtype, "shape": [2, 1], "data_offsets": [1 + size, 1 + 3 * size]},
        "last": {"dtype": dtype, "shape": [0], "data_offsets": [1 + 3 * size, 1 + 3 * size]},
    }
    file = SafetensorsFile(write(header, b"\x07" + 3 * one))
    found = {name: file.read(name) for name in header}
    assert all(found[name].dtype == kind for name in header if name != "odd")
    shapes = {name: array.shape for name, array in found.items()}
    assert shapes == {"odd": (1,), "empty": (0, 3), "scalar": (), "pair": (2, 1), "last": (0,)}
    assert found["scalar"].astype(np.float64) == 1
    assert found["pair"].astype(np.float64).tolist() == [[1], [1]]


def test_file_of_empty_tensors_only(write):
    file = SafetensorsFile(write({"none": {"dtype": "BF16", "shape": [3, 0], "data_offsets": [0, 0]}}, b""))
    assert file.read("none").shape == (3, 0)


def test_rows(write):
    file = SafetensorsFile(write({"a": A, "b": B}))
    assert file.read("a", slice(1, 2)).tolist() == [[3, 4]]
    assert file.read("b", slice(1, None)).tolist() == [-2.0]
    assert file.read("a", slice(2, 2)).shape == (0, 2)


def test_what_is_read_is_the_readers_own(write):
    file = SafetensorsFile(write({"a": A, "b": B}))
    file.read("b")[0] = 7
    assert file.read("b").tolist() == [0.5, -2.0]


def test_agrees_with_the_safetensors_library(checkpoint):
    path = checkpoint("tiny-k31") / "model-00001-of-000002.safetensors"
    file = SafetensorsFile(path)
    with safe_open(path, framework="numpy") as library:
        assert set(library.keys()) == file.tensors.keys()
        for name in file.tensors:
            wanted = library.get_tensor(name)
            np.testing.assert_array_equal(file.read(name), wanted, strict=True)


def test_cut_by_three_bytes(write):
    path = write({"a": A, "b": B})
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    text = message(path)
    assert f"truncated: tensor b ends at byte {len(whole)}, the file has {len(whole) - 3}" in text


def test_two_bytes_too_many(write):
    path = write({"a": A, "b": B}, DATA + b"\0\0")
    size = path.stat().st_size
    assert f"2 bytes too long: its last tensor (b) ends at byte {size - 2}, the file has {size}" in message(path)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_shorter_than_the_header_length(tmp_path, size):
    path = tmp_path / "part.safetensors"
    path.write_bytes(bytes(size))
    assert f"truncated or not a safetensors file: {size} bytes" in message(path)


@pytest.mark.parametrize("length", [10_000, 2**40, 2**64 - 1])
def test_header_longer_than_the_file(write, length):
    path = write({"a": A, "b": B}, length=length)
    text = message(path)
    assert f"{path.stat().st_size} bytes" in text
    assert str(8 + length) in text


def test_name_twice_in_the_header(write):
    entry = json.dumps(A)
    text = message(write(f'{{"a": {entry}, "b": {json.dumps(B)}, "a": {entry}}}'.encode()))
    assert "tensor a is listed twice" in text


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (B | {"data_offsets": [3, 11]}, "tensor b overlaps the tensor before it (a)"),
        (B | {"data_offsets": [0, 8]}, "tensor b overlaps the tensor before it (a)"),
        (B | {"data_offsets": [5, 13]}, "tensor b leaves a gap behind the tensor before it (a)"),
        (B | {"data_offsets": [4, 8]}, "tensor b: F32 [2] takes 8 bytes, the header gives it 4"),
        (B | {"data_offsets": [4, 16]}, "tensor b: F32 [2] takes 8 bytes, the header gives it 12"),
        (B | {"data_offsets": [12, 4]}, "tensor b: F32 [2] takes 8 bytes, the header gives it -8"),
        (B | {"data_offsets": [-4, 4]}, "tensor b: F32 [2]"),
        (B | {"shape": [3]}, "tensor b: F32 [3] takes 12 bytes, the header gives it 8"),
        (B | {"shape": [-1, -2]}, "tensor b: F32 [-1, -2]"),
        (B | {"dtype": "F12"}, "tensor b: unknown dtype 'F12'"),
        ({"dtype": "F32", "shape": [2]}, "tensor b: damaged header entry"),
        (B | {"shape": None}, "tensor b: damaged header entry"),
        (B | {"data_offsets": [4]}, "tensor b: damaged header entry"),
        (B | {"shape": ["two"]}, "tensor b: damaged header entry"),
        (B | {"shape": [float("inf")]}, "tensor b: damaged header entry"),
        ("b", "tensor b: damaged header entry 'b'"),
    ],
)
def test_damaged_entry(write, entry, words):
    assert words in message(write({"a": A, "b": entry}))


def test_gap_before_the_first_tensor(write):
    assert "tensor b leaves a gap" in message(write({"b": B}))


@pytest.mark.parametrize("header", [b"", b"{", b"\xff\xfe", b"{'a': 1}", b"[]", b"[1]", b"5", b'"a"', b"null"])
def test_header_is_not_a_json_object(write, header):
    assert "header" in message(write(header))


def test_no_damaged_byte_of_the_header_is_anything_but_a_checkpoint_error(write):
    whole = write({"a": A, "b": B}).read_bytes()
    path = write({"a": A, "b": B})
    refused = 0
    for place in range(len(whole) - len(DATA)):
        for byte in b'\x00"[]{},:-e9\xff':
            path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            try:
                file = SafetensorsFile(path)
            except CheckpointError:
                refused += 1
            else:
                assert sum(file.read(name).nbytes for name in file.tensors) == len(DATA)
    assert refused > 1000
