"""`kimi-jax bench` and `kimi-jax warmup`."""

import json

import jax
import pytest

from kimi_jax.cli.main import main
from kimi_jax.planning.measure import _part_of_operation, floor_bytes


def test_bytes_that_a_step_must_move(tiny):
    """By hand from the tiny model's sizes: 16 experts, 4 a token."""
    model = tiny("tiny-kimi-linear")
    expert = 3 * 48 * 128 * 2  # bfloat16
    experts = 6 * 16 * expert
    stored = sum(x.nbytes for x in jax.tree.leaves(model.params))
    embedding = 512 * 128 * 2
    state = 2 * 5 * (4 * 16 * 16 * 4 + 3 * 3 * 64 * 4)  # five KDA layers: states and tails, float32
    found = {rows: floor_bytes(model, rows, 100) for rows in (1, 2)}
    latents = 2 * 100 * (32 + 8) * 4
    assert found[1] == pytest.approx(stored - embedding - experts + experts / 4 + state + latents, rel=0.01)
    assert found[2] - found[1] == pytest.approx(experts * (1 - 0.75**2 - 0.25) + state + latents, rel=0.02)


def test_operations_belong_to_the_innermost_part():
    lines = [
        "HloModule m",
        "",
        "ENTRY %main (x: f32[2]) -> f32[2] {",
        '  %x = f32[2]{0} parameter(0), metadata={op_name="params"}',
        '  %a = f32[2]{0} add(%x, %x), metadata={op_name="jit(extend)/while/body/kda/add"}',
        '  %b = f32[2]{0} add(%a, %a), metadata={op_name="jit(extend)/dispatch/shard_map/experts/add"}',
        '  ROOT %c = f32[2]{0} add(%b, %b), metadata={op_name="jit(extend)/experts_of_none/add"}',
        "}",
    ]
    assert _part_of_operation("\n".join(lines)) == {"x": "other", "a": "kda", "b": "experts", "c": "other"}


def test_bench(tmp_path, capsys):
    options = ["--prompt", "64", "--batch", "2", "--context", "16", "--profile", str(tmp_path / "kept"), "--json"]
    assert main(["bench", "demo-k3", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    (prompt,), (step,) = found["prefill"], found["decode"]
    assert (prompt["batch"], prompt["tokens"], step["batch"], step["context"]) == (1, 64, 2, 16)
    assert step["tokens_per_second"] == pytest.approx(2 / step["seconds"])
    assert step["floor_seconds"] == pytest.approx(step["floor_bytes"] / found["bytes_per_second"])
    for parts in found["seconds_by_part"].values():
        assert {"kda", "mla", "mlp", "residuals", "router", "experts", "shared_experts", "head"} <= set(parts)
        assert all(seconds >= 0 for seconds in parts.values())
    assert len(list((tmp_path / "kept").rglob("*.xplane.pb"))) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prompt", "0"], "--prompt wants numbers of at least 1, found 0"),
        (["--context", "1000000"], "the model has 4096"),
        (["--batch", "3", "--mesh", "data=2"], "--batch 3 cannot be split over data=2"),
        (["--mesh", "data"], "cannot read mesh"),
    ],
)
def test_wrong_use(checkpoint, options, said, capsys):
    assert main(["bench", str(checkpoint("tiny-kimi-linear")), *options]) == 2
    assert said in capsys.readouterr().err


def test_what_is_warmed_up_is_not_compiled_again(tmp_path, capsys):
    mesh = "data=1,tensor=2"
    kept = tmp_path / "compiled"
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(kept))
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    try:
        assert main(["warmup", "demo-k3", "--mesh", mesh, "--max-len", "9", "--tokens", "1", "3", "999"]) == 0
        warm = sorted(path.name for path in kept.glob("jit_extend*-cache"))
        out = capsys.readouterr().out
        assert len(warm) == 2
        assert "decode-1x1-256: " in out
        assert "prefill-1x16-256: " in out
        assert f"compiled into {kept}" in out
        jax.clear_caches()
        assert (
            main(["generate", "demo-k3", "--mesh", mesh, "--max-new-tokens", "3", "--prompt-ids", "1", "2", "3"]) == 0
        )
        assert sorted(path.name for path in kept.glob("jit_extend*-cache")) == warm
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()
