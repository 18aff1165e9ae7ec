import ml_dtypes
import numpy as np
import pytest

import kimi_jax as kj
from kimi_jax.checkpoint.names import is_stacked
from kimi_jax.checkpoint.storage import CheckpointError
from kimi_jax.checkpoint.write import write_checkpoint
from kimi_jax.config import read_json_object, shipped_directory
from kimi_jax.model.model import abstract_params, flatten

O_PROJ = "layers.0.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def random():
    """A KDA layer with a dense MLP and an MLA layer with packed experts: configuration and numbers."""
    raw = read_json_object(shipped_directory() / "tiny-k3.json")
    text = raw["text_config"]
    text |= {"num_hidden_layers": 2, "hidden_size": 32, "num_experts": 4}
    text["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2}
    rng = np.random.default_rng(0)
    params = {}
    for name, (struct, _) in abstract_params(kj.ModelConfig.from_dict(raw)).items():
        values = rng.integers(0, 128, struct.shape) if struct.dtype == np.uint8 else rng.normal(size=struct.shape)
        params[name] = values.astype(struct.dtype)
    return raw, params


def test_what_is_written_is_loaded(random, tmp_path):
    raw, params = random
    wide = {name: v if is_stacked(name) else v.astype(np.float32) for name, v in params.items()}
    for written in (params, wide):
        write_checkpoint(tmp_path, raw, written, {"note.txt": b"text"})
        model = kj.load_model(tmp_path)
        loaded = dict(flatten(model.params))
        assert model.config == kj.ModelConfig.from_dict(raw)
        assert loaded.keys() == params.keys()
        for name, value in written.items():
            assert loaded[name].dtype == value.dtype, name
            np.testing.assert_array_equal(loaded[name], value, err_msg=name)
    assert (tmp_path / "note.txt").read_bytes() == b"text"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:1], r"o_proj\.weight has the shape \(1, 32\), the file wants \(32, 32\)"),
        (lambda x: x.astype(np.float64), r"o_proj\.weight is float64, wanted one of BF16, F32"),
        (None, r"o_proj\.weight is missing"),
    ],
)
def test_faults_name_the_parameter(random, change, message, tmp_path):
    raw, params = random
    kept = {name: value for name, value in params.items() if name != O_PROJ}
    faulty = kept if change is None else kept | {O_PROJ: change(params[O_PROJ])}
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path / "out", raw, faulty, {})
    assert not (tmp_path / "out").exists()


def test_a_parameter_too_many_is_named(random, tmp_path):
    raw, params = random
    with pytest.raises(CheckpointError, match=r"layers\.9\.norm\.weight is none of this configuration's"):
        write_checkpoint(tmp_path, raw, params | {"layers.9.norm.weight": np.zeros(3, ml_dtypes.bfloat16)}, {})
