"""Sizes and features of images, by the published processor's numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_jax.chat.errors import ChatError
from kimi_jax.chat.images import image_geometry, image_placeholder


@pytest.mark.parametrize(
    ("size", "scaled", "padded", "features"),
    [
        ((4000, 3000), (4000, 3000), (4004, 3024), 15_444),
        ((10000, 100), (7168, 71), (7168, 84), 768),
        ((100, 100), (100, 100), (112, 112), 16),
        ((8000, 8000), (3586, 3586), (3612, 3612), 16_641),
        # The most there can be: just above 65,536 patches, and both sides just above a multiple of 28.
        ((1861, 7041), (1850, 7002), (1876, 7028), 16_817),
        ((1, 1), (1, 1), (28, 28), 1),
        ((28, 28), (28, 28), (28, 28), 1),
        ((29, 28), (29, 28), (56, 28), 2),
        ((7168, 1), (7168, 1), (7168, 28), 256),
        # 100000 * (7168 / 100000) is a little less than 7168 in float64.
        ((1, 100_000), (1, 7167), (28, 7168), 256),
    ],
)
def test_published_sizes(size, scaled, padded, features):
    found = image_geometry(*size)
    assert (found.width, found.height) == scaled
    assert (found.padded_width, found.padded_height) == padded
    assert found.features == features


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_any_size(width, height):
    found = image_geometry(width, height)
    assert found.padded_width % 28 == found.padded_height % 28 == 0
    assert 0 <= found.padded_width - found.width < 28
    assert 0 <= found.padded_height - found.height < 28
    assert found.features == found.padded_width * found.padded_height // 784 <= 16_817
    assert max(found.padded_width, found.padded_height) <= 7168
    assert found.width <= width
    assert found.height <= height
    turned = image_geometry(height, width)
    assert (turned.width, turned.height) == (found.height, found.width)


def test_placeholder():
    assert image_placeholder(640, 480) == ("<|media_begin|>image 640x480<|media_content|><|media_pad|><|media_end|>")


@pytest.mark.parametrize("size", [(0, 1), (1, -1), (1.5, 2), ("3", 4), (None, 4), (True, 4), (10**5000, 4)])
@pytest.mark.parametrize("function", [image_geometry, image_placeholder])
def test_sizes_that_are_none(function, size):
    with pytest.raises(ChatError, match=r"image\.(width|height): found .*, wanted the original picture's in pixels"):
        function(*size)
