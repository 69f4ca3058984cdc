"""
Puts a model's own image markup where the client put its images.

A chat template is given an image as a text: a mark that names its content and that it
prints like any other text, in every role and in results of tools. So an image stands
where the client put it, and the model's own markup takes the mark's place. A mark that
someone typed makes one too many: the request is refused.
"""

import re
from collections.abc import Iterator, Sequence

from sidecar.core.errors import BadRequest
from sidecar.core.prompt import SeenImage
from sidecar.core.requests import IMAGE_MARK
from sidecar.pipeline.template.elements import Element, ImageSlot


def place_images(
    elements: Sequence[Element], images: Sequence[SeenImage]
) -> tuple[Element, ...]:
    """
    Put images in the places of their marks.

    Args:
        images: in the order of the conversation.
    Raises:
        BadRequest: the template does not print each of them once, and in order.
    """
    by_mark = {image.mark: image for image in images}
    marks = re.compile("|".join(map(re.escape, by_mark)))
    placed: list[Element] = []
    for element in elements:
        if isinstance(element, str):
            placed += _cut(element, marks, by_mark)
        else:
            placed.append(element)
    found = [e.image.mark for e in placed if isinstance(e, ImageSlot)]
    if found != [image.mark for image in images]:
        raise BadRequest(
            f"the model's chat template prints {len(found)} of {len(images)} images in "
            f"their order; texts must not hold {IMAGE_MARK} and an image's letters",
            param="messages",
        )
    return tuple(placed)


def _cut(
    text: str, marks: re.Pattern[str], by_mark: dict[str, SeenImage]
) -> Iterator[Element]:
    at = 0
    for match in marks.finditer(text):
        if match.start() > at:
            yield text[at : match.start()]
        yield ImageSlot(by_mark[match.group()])
        at = match.end()
    if at < len(text):
        yield text[at:]
