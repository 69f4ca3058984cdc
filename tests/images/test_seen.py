"""What stands for an image in a prompt: no two images share it."""

import hashlib

import pytest

from sidecar.core.errors import BadRequest
from sidecar.core.prompt import FIRST, MADE, ProcessedImage, SeenImage
from sidecar.core.requests import IMAGE_MARK
from sidecar.images.seen import seen_image
from sidecar.pipeline.template.elements import ImageSlot
from sidecar.pipeline.template.image_slots import place_images

PAD, BEGIN, END = 9, 7, 8


def seen(name: str, count: int = 40, size: tuple[int, int] = (64, 64)) -> SeenImage:
    digest = hashlib.sha256(name.encode()).hexdigest()
    ids = (BEGIN, *[PAD] * count, END)
    return seen_image(digest, size, ProcessedImage(ids, PAD, {}))


def test_ids_are_made_of_the_image_one_by_one() -> None:
    one, other = seen("one"), seen("other")
    assert one.ids == seen("one").ids
    assert len(set(one.ids)) == len(one.ids) == 42
    assert not set(one.ids) & set(other.ids)
    assert all(MADE <= i < 1 << 31 for i in one.ids)
    assert [bool(i & FIRST) for i in one.ids] == [True] + [False] * 41
    assert one.read_ids == (BEGIN, *[PAD] * 40, END)


def test_size_and_number_of_pads_tell_images_apart_too() -> None:
    usual = seen("one")
    assert not set(usual.ids) & set(seen("one", size=(64, 32)).ids)
    assert not set(usual.ids) & set(seen("one", count=20).ids)


def test_marks_are_long_and_of_letters() -> None:
    """So that no rule for ids and clocks finds a value in one."""
    marks = {seen(str(number)).mark for number in range(2000)}
    assert len(marks) == 2000
    for mark in marks:
        assert mark.startswith(IMAGE_MARK)
        assert len(mark) == len(IMAGE_MARK) + 32
        assert mark.isalpha()
    # Nor can they be made of the pixels by whoever shows them on a page.
    digest = hashlib.sha256(b"0").hexdigest()
    letters = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
    assert IMAGE_MARK + digest[:32].translate(letters) not in marks


def test_too_few_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        seen_image("00" * 32, (4, 4), ProcessedImage((PAD, END), PAD, {}))


def test_images_stand_where_their_marks_are() -> None:
    one, two = seen("one"), seen("two")
    text = f"a {one.mark} b {two.mark}{one.mark} c"
    placed = place_images((text, "d"), (one, two, one))
    shown = [e.image.mark if isinstance(e, ImageSlot) else e for e in placed]
    assert shown == ["a ", one.mark, " b ", two.mark, one.mark, " c", "d"]


@pytest.mark.parametrize("order", [(1, 0), (0,), (0, 1, 1), (0, 0)])
def test_each_must_be_printed_once_and_in_order(order: tuple[int, ...]) -> None:
    images = seen("one"), seen("two")
    text = " ".join(images[number].mark for number in order)
    with pytest.raises(BadRequest):
        place_images((text,), images)
