"""Where bytes lie: sources behind fsspec, files that fail, and the chunks of a converted part."""

import json
import math
import sys
from pathlib import Path

import fsspec
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import kimi_jax as kj
from kimi_jax.checkpoint.array_store import BAND, chunk_shape
from kimi_jax.checkpoint.convert import convert
from kimi_jax.checkpoint.manifest import part_folder, read_record
from kimi_jax.checkpoint.source import HuggingFaceSource
from kimi_jax.checkpoint.storage import CheckpointError, LocalFile, open_folder
from kimi_jax.checkpoint.synthesize import synthesize
from kimi_jax.checkpoint.verify import verify
from kimi_jax.config import ModelConfig, find_config
from kimi_jax.model.model import abstract_params, flatten

pytestmark = pytest.mark.xdist_group("storage")
THREE_LAYERS = Path(__file__).parent / "three-layers.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint of three layers in four files, with a vision tower."""
    out = tmp_path_factory.mktemp("source") / "checkpoint"
    synthesize(THREE_LAYERS, out, file_bytes=300_000)
    (out / "generation_config.json").write_text('{"eos_token_id": 7}')
    return out


@pytest.fixture
def remote(source):
    """URL of a copy of `source` that lies in fsspec's memory."""
    system = fsspec.filesystem("memory")
    system.put(str(source), "/remote/checkpoint", recursive=True)
    yield "memory://remote/checkpoint"
    system.rm("/remote", recursive=True)


def same(got, want):
    pairs = zip(flatten(got.params), flatten(want.params), strict=True)
    return all(a == b and np.asarray(x).tobytes() == np.asarray(y).tobytes() for (a, x), (b, y) in pairs)


def test_model_from_a_url(remote, source):
    model = kj.load_model(remote)
    assert same(model, kj.load_model(source))
    assert model.stop_ids == (7, 510)
    assert model.vision_tensors == 18


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """`source` converted from a URL; not to be changed."""
    system = fsspec.filesystem("memory")
    system.put(str(source), "/module/checkpoint", recursive=True)
    out = tmp_path_factory.mktemp("converted") / "checkpoint"
    convert("memory://module/checkpoint", out)
    system.rm("/module", recursive=True)
    return out


def test_conversion_from_a_url(converted, source, remote):
    assert verify(converted, source) == verify(converted, remote)
    assert same(kj.load_model(converted), kj.load_model(source))
    assert (converted / "generation_config.json").read_text() == '{"eos_token_id": 7}'


def test_remote_file_that_is_missing(remote):
    fsspec.filesystem("memory").rm("/remote/checkpoint/model-00003-of-000004.safetensors")
    with pytest.raises(CheckpointError, match=r"memory://\S*remote/checkpoint: 1 of 4 files are missing.*model-00003"):
        kj.load_model(remote)


def test_remote_file_that_vanishes_while_reading(remote):
    opened = HuggingFaceSource(remote)
    name = "model-00001-of-000004.safetensors"
    fsspec.filesystem("memory").rm(f"/remote/checkpoint/{name}")
    with pytest.raises(CheckpointError, match=rf"{name}: reading bytes \d+ to \d+ failed"):
        opened.read("embed_tokens.weight", (slice(0, 4), slice(0, 128)))


def test_remote_file_that_shrinks_while_reading(remote):
    opened, system = HuggingFaceSource(remote), fsspec.filesystem("memory")
    path = "/remote/checkpoint/model-00001-of-000004.safetensors"
    system.pipe_file(path, system.cat_file(path)[:5000])
    start = opened.files.tensors["language_model.model.embed_tokens.weight"].start
    with pytest.raises(CheckpointError, match=rf"gave {5000 - start} bytes, wanted bytes {start} to {start + 131072}"):
        opened.read("embed_tokens.weight", (slice(0, 512), slice(0, 128)))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere://bucket/x", r"nowhere://bucket/x: cannot be listed: .*nowhere"),
        ("memory://no/such/folder", r"memory://no/such/folder: cannot be listed"),
        ("no/such/folder", r"no/such/folder is not a directory"),
    ],
)
def test_folder_that_is_not_there(url, message):
    with pytest.raises(CheckpointError, match=message):
        open_folder(url)


@pytest.mark.parametrize(("url", "package"), [("gs://bucket/x", "gcsfs"), ("s3://bucket/x", "s3fs")])
def test_package_that_is_not_installed_is_named(url, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CheckpointError, match=f"; pip install {package}"):
        kj.load_model(url)


def test_local_file_that_shrinks_while_reading(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(range(200)))
    file, out = LocalFile(path), bytearray(100)
    file.read_into(50, memoryview(out))
    assert out == bytes(range(50, 150))
    path.write_bytes(bytes(120))
    with pytest.raises(CheckpointError, match=r"weights\.bin: ends at byte 120, wanted bytes 50 to 150"):
        file.read_into(50, memoryview(out))
    file = LocalFile(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"weights\.bin: reading bytes 50 to 150 failed: .*No such file"):
        file.read_into(50, memoryview(out))


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_plain_orbax_reads_a_part(converted, source):
    restored = ocp.PyTreeCheckpointer().restore(part_folder(converted, "layers.1"))
    layer = kj.load_model(source).params["layers"]["1"]
    assert restored.keys() == {"layers"}
    assert restored["layers"].keys() == {"1"}
    found = dict(flatten(restored["layers"]["1"]))
    assert found.keys() == dict(flatten(layer)).keys()
    for name, param in flatten(layer):
        assert found[name].dtype == param.dtype, name
        assert np.asarray(found[name]).tobytes() == np.asarray(param).tobytes(), name
    assert {str(array.dtype) for array in found.values()} == {"bfloat16", "float32", "uint8"}
    tower = ocp.PyTreeCheckpointer().restore(part_folder(converted, "unused"))
    assert tower["vision_tower.patch_embed.proj.weight"].shape == (32 * 3 * 2 * 2,)


def test_chunks_on_the_disk(tiny, converted):
    found = {}
    for name, array in read_record(converted, "layers.1").items():
        kvstore = {"driver": "file", "path": f"{part_folder(converted, 'layers.1')}/{name}/"}
        spec = {"driver": "zarr3", "kvstore": kvstore}
        store = ts.open(spec, open=True, read=True).result()
        found[name] = store.chunk_layout.read_chunk.shape
        assert found[name] == array.chunks
        (codec,) = store.spec().to_json()["metadata"]["codecs"]
        assert [c["name"] for c in codec["configuration"]["codecs"]] == ["bytes", "crc32c"]
        assert len(array.digests) == math.ceil(array.shape[0] / array.chunks[0])
    assert found["layers.1.block_sparse_moe.experts.w2.weight_packed"] == (1, 64, 32)
    assert found["layers.1.self_attn.o_proj.weight"] == (128, 16)
    assert found["layers.1.self_attn.q_proj.weight"] == (16, 128)


@pytest.mark.parametrize(
    ("shape", "axes", "itemsize", "chunks"),
    [
        ((896, 3072, 1792), ("experts", None, None), 1, (1, 3072, 1792)),
        ((896, 3072, 112), ("experts", None, None), 1, (1, 3072, 112)),
        ((7168, 12288), (None, ("heads", 96)), 2, (1024, 128)),
        ((12288, 7168), (("heads", 96), None), 2, (128, 7168)),
        ((163840, 7168), ("vocab", None), 2, (256, 7168)),
        ((1024, 1024, 1024), (None, None, None), 2, (16, 1024, 1024)),
        ((7, 40_000_000), (None, None), 2, (1, 40_000_000)),
        ((64, 31), ("vocab", None), 2, (64, 31)),
        ((), (), 4, ()),
    ],
)
def test_chunk_shapes(shape, axes, itemsize, chunks):
    assert chunk_shape(shape, axes, itemsize) == chunks


def test_every_array_of_k3_has_chunks_that_devices_hold_whole():
    config = ModelConfig.from_file(find_config("kimi-k3"))
    kinds = {(struct.shape, axes, struct.dtype) for struct, axes in abstract_params(config).values()}
    assert len(kinds) > 20
    divided = set()
    for shape, axes, dtype in kinds:
        chunks = chunk_shape(shape, axes, jnp.dtype(dtype).itemsize)
        row = math.prod(shape[1:]) * jnp.dtype(dtype).itemsize
        assert chunks[0] * row <= BAND or chunks[0] == 1
        assert all(size % chunk == 0 for size, chunk in zip(shape, chunks, strict=True))
        if math.prod(shape) * jnp.dtype(dtype).itemsize < 4096:
            continue
        for size, chunk, axis in zip(shape, chunks, axes, strict=True):
            parts = 1 if axis is None else axis[1] if isinstance(axis, tuple) else size
            for ways in (2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 112, 128):
                if parts % ways == 0:
                    divided.add((axis[0] if isinstance(axis, tuple) else axis, ways))
                    assert (size // ways) % chunk == 0, (shape, axes, ways)
    assert {("heads", 96), ("heads", 32), ("vocab", 128), ("experts", 128), ("experts", 112), ("ffn", 8)} <= divided


def test_record_tells_shapes_and_dtypes(converted):
    raw = json.loads((converted / "params" / "layers.1.json").read_text())["arrays"]
    scale = raw["layers.1.block_sparse_moe.experts.w2.weight_scale"]
    assert (scale["shape"], scale["dtype"]) == ([4, 64, 2], "uint8")
    assert all(len(digest) == 64 for array in raw.values() for digest in array["digests"])
