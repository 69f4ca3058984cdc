"""OpenAI's `prediction`: what a client expects the answer to be."""

from sidecar.core.errors import BadRequest
from sidecar.dialects.fields import Fields


def read_prediction(fields: Fields) -> str:
    """
    Its text; "": none was sent.

    Raises:
        BadRequest: it is of another kind, or no text.
    """
    value = fields.object("prediction")
    if value is None:
        return ""
    given = Fields(value, fields.path("prediction"))
    if given.required_text("type") != "content":
        path = given.path("type")
        raise BadRequest(f"{path} must be content", param=path)
    content = given.raw("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        path = given.path("content")
        raise BadRequest(f"{path} must be a string or a list of texts", param=path)
    return "".join(_text(part) for part in given.objects("content"))


def _text(part: Fields) -> str:
    if part.required_text("type") != "text":
        raise BadRequest(f"{part.path('type')} must be text", param=part.path("type"))
    text = part.text("text")
    if text is None:
        raise BadRequest(
            f"{part.path('text')} must be a string", param=part.path("text")
        )
    return text
