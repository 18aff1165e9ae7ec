import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from kimi_jax.parallel.mesh import MeshError, axis_size, make_mesh, parse_mesh


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ({"data": 8}, (8, 1, 1)),
        ({"tensor": 4}, (1, 1, 4)),
        ({"tensor": 2, "data": 2}, (2, 1, 2)),
        ({"data": 1, "tensor": 8}, (1, 1, 8)),
        ({"context": 4, "tensor": 2}, (1, 4, 2)),
        ({}, (1, 1, 1)),
    ],
)
def test_every_axis_is_there_and_the_first_devices_are_taken(shape, sizes):
    mesh = make_mesh(shape)
    assert mesh.axis_names == ("data", "context", "tensor")
    assert mesh.devices.shape == sizes
    assert set(mesh.devices.flat) == set(jax.devices()[: np.prod(sizes)])
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert tuple(axis_size(mesh, axis) for axis in mesh.axis_names) == sizes


def test_none_is_one_device_without_a_mesh():
    assert make_mesh(None) is None
    assert axis_size(None, "tensor") == 1


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"data": 2, "expert": 4}, "unknown mesh axis 'expert'; the axes are data, context, tensor"),
        ({"data": 0}, "mesh axis 'data' must be a whole number of at least 1, found 0"),
        ({"tensor": -2}, "mesh axis 'tensor' must be a whole number of at least 1, found -2"),
        ({"tensor": True}, "found True"),
        ({"data": 3, "tensor": 4}, "mesh data=3 × context=1 × tensor=4 needs 12 devices, this job has 8"),
        ({"tensor": 9}, "mesh data=1 × context=1 × tensor=9 needs 9 devices, this job has 8"),
    ],
    ids=str,
)
def test_meshes_that_cannot_be_made(shape, message):
    with pytest.raises(MeshError, match=re.escape(message)):
        make_mesh(shape)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("data=2,tensor=4", {"data": 2, "tensor": 4}),
        (" tensor = 4 , data=2 ", {"tensor": 4, "data": 2}),
        ("tensor=16", {"tensor": 16}),
        (None, None),
        ("", None),
        (" none ", None),
        ("None", None),
    ],
)
def test_parse_mesh(text, shape):
    assert parse_mesh(text) == shape


@pytest.mark.parametrize(
    "text",
    ["data", "data=", "2", "2x4", "data=two", "data=-1", "data=1.5", "data=2,", "data=2;tensor=4", "data=2,data=4"],
)
def test_texts_that_are_no_mesh(text):
    with pytest.raises(MeshError, match=re.escape(f"{text!r}; write it as data=2,tensor=4")):
        parse_mesh(text)
