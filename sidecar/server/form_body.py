"""Forms with files (multipart/form-data), parsed by python-multipart, in memory."""

from dataclasses import dataclass, field
from typing import Any

from sidecar.core.errors import BadRequest

FORM_PATHS = ("/v1/audio/transcriptions", "/audio/transcriptions", "/v1/files")
_MAX_PARTS = 64
_MAX_FIELD_BYTES = 1 << 16
_MAX_HEADERS, _MAX_HEADER_BYTES = 8, 4096  # of a part


@dataclass(frozen=True, slots=True)
class FormFields:
    """
    A parsed form.

    Args:
        fields: texts by name; of equal names the last.
        files: contents by name. file_names: what their sender calls them.
        repeated: names that several parts have.
    """

    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    file_names: dict[str, str] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)


def parse_form(content_type: str, body: bytes) -> FormFields:
    """
    Parse a whole body.

    Args:
        content_type: the header, with its boundary.
    Raises:
        BadRequest: it is no such form, is broken off, or has too many parts.
    """
    from python_multipart import create_form_parser
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import parse_options_header

    if not content_type.lower().startswith("multipart/form-data"):
        raise BadRequest("the body must be a form: Content-Type multipart/form-data")
    parts, config = (
        _FormReader(),
        {
            "MAX_MEMORY_FILE_SIZE": len(body) + 1,  # never into a file of its own
            "MAX_HEADER_COUNT": _MAX_HEADERS,
            "MAX_HEADER_SIZE": _MAX_HEADER_BYTES,
            "UPLOAD_ERROR_ON_BAD_CTE": True,
        },
    )
    headers = {"Content-Type": content_type.encode("latin-1", "replace")}
    try:
        parser = create_form_parser(headers, parts.on_field, parts.on_file, config)
        parser.write(body)
        parser.finalize()
        _, options = parse_options_header(content_type)
        if not body.rstrip().endswith(b"--" + options.get(b"boundary", b"") + b"--"):
            raise ValueError("it is broken off")
    except (FormParserError, ValueError, AssertionError) as error:
        raise BadRequest("the body is not a whole form") from error
    return parts.form


class _FormReader:
    """Takes the parts as they are parsed."""

    def __init__(self) -> None:
        self.form = FormFields()
        self._num_parts = 0

    def on_field(self, part: Any) -> None:
        self._count()
        name, value = _text(part.field_name), part.value or b""
        if len(value) > _MAX_FIELD_BYTES:
            shown_name = name[:64]
            raise BadRequest(
                f"{shown_name} must have at most {_MAX_FIELD_BYTES} bytes",
                param=shown_name,
            )
        self._note(name)
        self.form.fields[name] = _text(value)

    def on_file(self, part: Any) -> None:
        self._count()
        name = _text(part.field_name)
        self._note(name)
        self.form.files[name] = part.file_object.getvalue()
        self.form.file_names[name] = _text(part.file_name)
        part.close()

    def _note(self, name: str) -> None:
        if name in self.form.fields or name in self.form.files:
            self.form.repeated.add(name)

    def _count(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise BadRequest(f"a form must have at most {_MAX_PARTS} parts")


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")
