"""Forms with files (multipart/form-data), parsed by python-multipart, in memory."""

from dataclasses import dataclass
from typing import Any

from sidecar.core.errors import BadRequest

FORM_PATHS = ("/v1/audio/transcriptions", "/audio/transcriptions")
_MOST_PARTS = 64
_MOST_FIELD_BYTES = 1 << 16
_MOST_HEADERS, _MOST_HEADER_BYTES = 8, 4096  # of a part


@dataclass(frozen=True, slots=True)
class Form:
    """
    A parsed form.

    Args:
        fields: texts by name; of equal names the last.
        files: contents by name.
    """

    fields: dict[str, str]
    files: dict[str, bytes]


def parse_form(content_type: str, body: bytes) -> Form:
    """
    Parse a whole body.

    Args:
        content_type: the header, with its boundary.
    Raises:
        BadRequest: it is no such form, is broken off, or has too many parts.
    """
    from python_multipart import create_form_parser
    from python_multipart.exceptions import FormParserError

    form, num_parts = Form({}, {}), 0

    def count() -> None:
        nonlocal num_parts
        num_parts += 1
        if num_parts > _MOST_PARTS:
            raise BadRequest(f"a form must have at most {_MOST_PARTS} parts")

    def on_field(field: Any) -> None:
        count()
        name, value = _text(field.field_name), field.value or b""
        if len(value) > _MOST_FIELD_BYTES:
            raise BadRequest(
                f"{name[:64]} must have at most {_MOST_FIELD_BYTES} bytes",
                param=name[:64],
            )
        form.fields[name] = _text(value)

    def on_file(file: Any) -> None:
        count()
        form.files[_text(file.field_name)] = file.file_object.getvalue()
        file.close()

    if not content_type.lower().startswith("multipart/form-data"):
        raise BadRequest("the body must be a form: Content-Type multipart/form-data")
    try:
        parser = create_form_parser(
            {"Content-Type": content_type.encode("latin-1")}, on_field, on_file,
            {
                "MAX_MEMORY_FILE_SIZE": len(body) + 1,  # never into a file of its own
                "MAX_HEADER_COUNT": _MOST_HEADERS,
                "MAX_HEADER_SIZE": _MOST_HEADER_BYTES,
                "UPLOAD_ERROR_ON_BAD_CTE": True,
            },
        )  # fmt: skip
        parser.write(body)
        parser.finalize()
    except (FormParserError, ValueError, AssertionError) as error:
        raise BadRequest("the body is not a whole form") from error
    return form


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")
