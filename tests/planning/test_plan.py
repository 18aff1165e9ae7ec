"""Fits or not, and the roofline: figures worked out by hand from the model's description."""

import pytest

from kimi_jax.config import ModelConfig
from kimi_jax.parallel.mesh import MeshError
from kimi_jax.planning.devices import Device, find_device
from kimi_jax.planning.memory import best_placement, meshes, place
from kimi_jax.planning.plan import on_paper, plan, smallest
from kimi_jax.planning.roofline import decode_steps

FULL = 1_048_576
GB = 10**9
EXPERTS = 1_446_456_066_048


@pytest.fixture(scope="module")
def k3():
    return ModelConfig.from_file("kimi-k3")


@pytest.fixture(scope="module")
def k31():
    return ModelConfig.from_file("kimi-k3.1-pro")


def test_on_paper(k3, k31):
    paper = on_paper(k3, 8 * 288 * GB, FULL)
    assert paper.conversation_bytes == 27_648 * FULL + 434_110_464 + 15_261_696 == 29_440_401_408
    assert paper.free == 743_139_675_136
    assert paper.conversations == 25
    sparse = on_paper(k31, 8 * 288 * GB, FULL)
    assert sparse.conversation_bytes == paper.conversation_bytes + 6_144 * FULL
    assert sparse.conversations == 20


def test_25_and_20_hang_on_no_choice_of_what_counts(k3, k31):
    # With or without the vision tower, and with or without the convolution inputs. Without indexer keys it were 25.
    for config, expected in ((k3, 25), (k31, 20)):
        paper = on_paper(config, 8 * 288 * GB, FULL)
        for vision in (0, 894_717_952):
            for tails in (0, 15_261_696):
                assert (paper.free + vision) // (paper.conversation_bytes - tails) == expected


def test_entries_that_an_indexer_chooses_are_padded_in_memory(k3, k31):
    """576 numbers to 640, in 24 layers; on paper they are not."""
    dense, sparse = (place(config, {"tensor": 16}, 8192).conversation for config in (k3, k31))
    assert sparse - dense == 8192 * 24 * 2 * (64 + 128)


def test_16_h200_hold_the_weights_and_8_do_not(k3):
    assert on_paper(k3, 16 * 141 * GB, FULL).free == 695_139_675_136
    eight = on_paper(k3, 8 * 141 * GB, FULL)
    assert eight.free == -432_860_324_864
    assert eight.conversations == 0


def test_weights_of_a_device(k3):
    placement = place(k3, {"data": 2, "tensor": 4}, FULL)
    split = placement.weights["split over data × tensor"]
    assert split == EXPERTS // 8
    whole = (
        92 * (896 * 4 + 3584 * 2)  # the routers' biases, the norms of the experts' sums
        + 24 * ((1536 + 576) * 7168 + 1536 + 512) * 2  # the MLA layers' down projections and norms
        + 69 * (128 * 7168 * 2 + 128 * 4)  # the forget gates' down projections, the heads' norm
        + 8_042_496  # norms and residual mixes
    )
    assert placement.weights["whole on every device"] == whole
    text = 114_404_258_816 - 894_717_952 - 69 * 32 * 4  # without vision and A_log's padding, besides the experts
    assert placement.weights["split over tensor"] == (text - whole) // 4
    assert placement.stored == EXPERTS + text
    assert placement.copied == 7 * whole + (text - whole)  # the second half of the mesh holds the same split


def test_conversation_on_a_mesh(k3):
    # The latents lie over the batch only: every device of a group holds all of them; heads are split.
    placement = place(k3, {"data": 2, "tensor": 4}, FULL)
    assert placement.groups == 2
    assert placement.conversation == 27_648 * FULL + (434_110_464 + 15_261_696) // 4
    assert placement.conversations(288 * GB) == 4


def test_temporaries(k3):
    placement = place(k3, {"tensor": 8}, 8192)
    residuals = 1024 * 7168 * (8 + 1) * 6
    experts = 1024 * 16 * (2 * 3584 + 6 * 3072 + 8 * 3584)
    assert placement.temporaries(1) == residuals + experts + 8 * 163_840 // 8
    wider = place(k3, {"data": 2, "tensor": 8}, 8192)  # the tokens of both groups reach every device
    assert wider.temporaries(1) - placement.temporaries(1) == experts


def test_as_many_conversations_as_fit_and_not_one_more(k3):
    placement = place(k3, {"data": 4, "tensor": 16}, 8192)
    memory = 95 * GB
    rows = placement.conversations(memory) // 4
    assert placement.total(rows) <= memory < placement.total(rows + 1)
    assert placement.conversations(placement.total(3)) == 12
    assert placement.conversations(placement.total(3) - 1) == 8
    assert placement.conversations(placement.weight_bytes - 1) == 0


def test_the_best_mesh_is_the_best_of_all(k3):
    best = best_placement(k3, 8, 288 * GB, FULL)
    for mesh in meshes(8):
        assert place(k3, mesh, FULL).conversations(288 * GB) <= best.conversations(288 * GB)
    assert best_placement(k3, 8, 288 * GB, FULL, batch=1).groups == 1
    assert len(list(meshes(7))) >= 2


@pytest.mark.parametrize(
    ("name", "count"), [("v5p", 32), ("v6e", 64), ("TPU7x", 16), ("H200", 16), ("B200", 16), ("B300", 8), ("GB300", 8)]
)
def test_smallest(k3, name, count):
    found = smallest(k3, find_device(name), FULL)
    assert found.on_paper == count
    if name != "v6e":
        assert found.with_mesh == count


def test_smallest_of_a_chip_that_is_too_small(k3):
    found = smallest(k3, Device("small", 8 * GB), FULL)
    assert (found.on_paper, found.with_mesh, found.mesh) == (None, None, None)


def test_bytes_of_a_step_at_batch_1(k3):
    (step,) = decode_steps(k3, [1], 1)
    text = 114_404_258_816 - 894_717_952 - 69 * 32 * 4
    assert step.dense_bytes == text - 163_840 * 7168 * 2 == 111_160_721_792
    assert step.expert_bytes == EXPERTS * 16 // 896
    assert step.state_bytes == 2 * (434_110_464 + 15_261_696) == 898_744_320
    assert step.cache_bytes == 27_648
    assert round(step.bytes / GB) == 138


def test_bytes_of_a_step_at_batch_64(k3):
    (step,) = decode_steps(k3, [64], 8192)
    assert step.touched == pytest.approx(0.68437, abs=1e-5)
    assert round(step.expert_bytes / 1e12, 2) == 0.99
    assert step.state_bytes == 64 * 898_744_320
    assert step.cache_bytes == 64 * 8192 * 27_648


def test_cache_read_with_an_indexer(k31):
    (step,) = decode_steps(k31, [1], FULL)
    assert step.cache_bytes == 6_144 * FULL + 2048 * 27_648
    (short,) = decode_steps(k31, [1], 1000)
    assert short.cache_bytes == 1000 * 33_792


def test_operations_of_a_step(k3):
    (step,) = decode_steps(k3, [2], 100)
    attention = 24 * 2 * 100 * 96 * (576 + 512)
    assert step.flops == 2 * (2 * 104_189_612_640 + attention + 69 * 6 * 96 * 128 * 128)


def test_time_of_a_step(k3):
    (step,) = decode_steps(k3, [1], 8192)
    seconds, bound = step.seconds(find_device("B300"), 8)
    assert (seconds, bound) == (step.bytes / 64e12, "memory")
    slow = Device("slow", GB, bandwidth=10**15, peak_flops=10**12)
    assert step.seconds(slow, 2) == (step.flops / 2e12, "compute")
    assert step.seconds(Device("x", GB, bandwidth=10), 1)[1] == "memory"
    with pytest.raises(ValueError, match="the bandwidth of x is not known"):
        step.seconds(Device("x", GB), 1)


def test_a_plan(k3):
    found = plan(k3, find_device("B300"), 8, mesh={"data": 2, "tensor": 4}, batch=6)
    assert (found.context, found.paper.conversations, found.conversations) == (FULL, 25, 4)
    assert found.rows == 3
    assert [step.batch for step in found.steps] == [1, 2, 4, 6, 8, 16, 32, 64, 128, 256]
    assert [found.fits(batch) for batch in (3, 4, 5, 25, 26)] == [
        "with this mesh", "with this mesh", "on paper", "on paper", "nowhere",
    ]  # fmt: skip
    tpu = plan(k3, find_device("TPU7x"), 16, context=8192)
    assert tpu.device_memory == 96 * GB
    assert tpu.placement.devices == 32


def test_other_models():
    linear = ModelConfig.from_file("kimi-linear-48b")
    found = plan(linear, find_device("H200"), 1)
    assert found.paper.conversations == found.paper.free // found.paper.conversation_bytes > 0
    assert found.placement.copied == 0
    # All experts in bfloat16: a token meets 8 of 256.
    assert found.steps[0].expert_bytes == 26 * 8 * 3 * 1024 * 2304 * 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"count": 0}, ValueError, "count must be at least 1, found 0"),
        ({"context": 0}, ValueError, "context must be at least 1, found 0"),
        ({"batch": -1}, ValueError, "batch must be at least 1, found -1"),
        ({"context": FULL + 1}, ValueError, "context 1048577 is beyond the model's limit of 1048576 tokens"),
        ({"mesh": {"tensor": 4}}, ValueError, "mesh .*tensor=4 has 4 devices, 8 x B300 have 8"),
        ({"mesh": {"data": 2, "tensor": 4}, "batch": 3}, ValueError, "batch 3 cannot be split over the 2 groups"),
        ({"mesh": {"rows": 8}}, MeshError, "unknown mesh axis 'rows'; the axes are data, .*tensor"),
        ({"mesh": {"tensor": 64}}, MeshError, "axis 'heads' of 96 .* 'tensor' of 64: 64 does not divide 96"),
        ({"count": 5}, MeshError, "no mesh over 5 devices divides the model .*5 does not divide"),
        ({"count": 7, "batch": 3}, MeshError, "no mesh over 7 devices divides the model"),
    ],
)
def test_what_cannot_be_planned(k3, arguments, error, message):
    with pytest.raises(error, match=message):
        plan(k3, find_device("B300"), **{"count": 8, **arguments})
