"""Images in prompts: the text that stands for one, and how many features it has.

In a prompt an image is `<|media_begin|>image 640x480<|media_content|><|media_pad|><|media_end|>`, with the size of
the picture as it came. The one `<|media_pad|>` stands for all features, whose number follows from that size alone.
A part of a message's content gives an image as

    {"type": "image", "width": 640, "height": 480}

`image_url` is accepted for `image`; other keys, such as the picture itself, are for whoever reads the picture.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kimi_jax.chat.errors import wrong

IMAGE_PART_TYPES = ("image", "image_url")
PATCH_SIZE = 14
MERGED_PATCHES = 2
MAX_PATCHES = 65_536
MAX_PATCHES_ONE_SIDE = 512
MAX_PIXELS_ONE_SIDE = 10**9


@dataclass(frozen=True)
class ImageGeometry:
    """What becomes of an image, in pixels, and the number of features that it has.

    `width` and `height` are what it is scaled to; `padded_width` and `padded_height`, multiples of 28, are its size
    once black is added at the right and below. `features` counts the vectors that take the place of `<|media_pad|>`.
    """

    width: int
    height: int
    padded_width: int
    padded_height: int
    features: int


def image_geometry(width: int, height: int) -> ImageGeometry:
    """The size an image is scaled and padded to, and its number of features.

    Images are never made larger. The rounding is the published processor's, in float64.

    **Arguments:**

    - `width`, `height`: of the original picture, in pixels.

    **Returns:** the geometry; at most 16,817 features.

    **Raises:** `ChatError` unless both are positive whole numbers.
    """
    _check_size(width, height, "image")
    limit = MAX_PATCHES_ONE_SIDE * PATCH_SIZE
    patches = max(1, width // PATCH_SIZE) * max(1, height // PATCH_SIZE)
    scale = min(1.0, math.sqrt(MAX_PATCHES / patches), limit / width, limit / height)
    new_width = min(max(1, int(width * scale)), limit)
    new_height = min(max(1, int(height * scale)), limit)
    feature = PATCH_SIZE * MERGED_PATCHES
    columns = -(-new_width // feature)
    rows = -(-new_height // feature)
    return ImageGeometry(new_width, new_height, columns * feature, rows * feature, columns * rows)


def image_placeholder(width: int, height: int) -> str:
    """The structural text that stands for an image of this original size.

    **Raises:** `ChatError` unless both are positive whole numbers.
    """
    _check_size(width, height, "image")
    return f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"


def placeholder_of_part(part: Mapping[str, Any], where: str) -> str:
    """The placeholder for a content part of type `image` or `image_url`; `where` is its place, for errors."""
    width, height = part.get("width"), part.get("height")
    _check_size(width, height, where)
    return image_placeholder(int(width), int(height))  # type: ignore[arg-type]


def _check_size(width: object, height: object, where: str) -> None:
    for name, value in (("width", width), ("height", height)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_PIXELS_ONE_SIDE:
            wanted = 'the original picture\'s in pixels, as in {"type": "image", "width": 640, "height": 480}'
            raise wrong(f"{where}.{name}", value, wanted)
