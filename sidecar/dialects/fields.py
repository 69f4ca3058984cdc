"""Typed reading of a JSON object: every complaint names the field and the range."""

from collections.abc import Iterator, Mapping
from typing import Any

from sidecar.core.errors import BadRequest, ValidationFailed
from sidecar.core.json_bytes import MAX_LEVELS, check_depth
from sidecar.dialects.known_fields import DONE_ANYWAY, NOTHING

_MAX_NAMES = 1024  # of an object that goes into a prompt


class Fields:
    """
    A JSON object and where it stands in the request. null counts as absent.

    Args:
        sent_as: what the client calls a field that is read under another name.
    Raises:
        BadRequest: a value of the wrong type. ValidationFailed: out of range.
    """

    def __init__(
        self, value: Any, path: str = "", sent_as: Mapping[str, str] | None = None
    ) -> None:
        if not isinstance(value, dict):
            raise BadRequest(
                f"{path or 'the body'} must be an object, got {_kind(value)}",
                param=path or None,
            )
        self._value: dict[str, Any] = value
        self._path = path
        self._sent_as = sent_as or {}

    @property
    def where(self) -> str:
        """Full path of the object itself."""
        return self._path

    @property
    def whole(self) -> dict[str, Any]:
        """The object itself; not to be changed."""
        return self._value

    def require_printable(self) -> None:
        """BadRequest for an object that is nested too deep to be read or printed."""
        try:
            check_depth(self._value)
        except ValueError:
            raise BadRequest(
                f"{self._path} must be nested {MAX_LEVELS} levels deep at most",
                param=self._path,
            ) from None

    def path(self, name: str) -> str:
        """Full path of a field, for messages."""
        name = self._sent_as.get(name, name)
        return f"{self._path}.{name}" if self._path else name

    def raw(self, name: str) -> Any:
        """The value as it is; None if absent."""
        return self._value.get(name)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.raw(name)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong(name, "a string", value)

    def required_text(self, name: str) -> str:
        """A non-empty string that must be there."""
        value = self.text(name)
        if not value:
            raise BadRequest(
                f"{self.path(name)} must be a non-empty string", param=self.path(name)
            )
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self._wrong(name, "true or false", value)

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number in [low, high]."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, "a number", value)
        if not low <= value <= high:
            raise self._out_of_range(name, f"{low:g}..{high:g}", value)
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number in [low, high]; 3.0 counts as 3."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "a whole number", value)
        if not low <= value <= high:
            raise self._out_of_range(name, f"{low}..{high}", value)
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        """An object."""
        value = self.raw(name)
        if value is None or isinstance(value, dict):
            return value
        raise self._wrong(name, "an object", value)

    def printable_object(self, name: str) -> dict[str, Any] | None:
        """An object that goes into a prompt: not too deep or too wide to be printed."""
        value = self.object(name)
        if len(value or ()) > _MAX_NAMES:
            path = self.path(name)
            raise BadRequest(f"{path} may have at most {_MAX_NAMES} names", param=path)
        if value is not None:
            Fields(value, self.path(name)).require_printable()
        return value

    def items(self, name: str) -> list[Any]:
        """A list; empty if absent."""
        value = self.raw(name)
        if value is None:
            return []
        if isinstance(value, list):
            return value
        raise self._wrong(name, "a list", value)

    def objects(self, name: str) -> Iterator["Fields"]:
        """A list of objects."""
        for index, item in enumerate(self.items(name)):
            yield Fields(item, f"{self.path(name)}[{index}]")

    def _wrong(self, name: str, wanted: str, value: Any) -> BadRequest:
        path = self.path(name)
        return BadRequest(f"{path} must be {wanted}, got {_kind(value)}", param=path)

    def _out_of_range(self, name: str, wanted: str, value: Any) -> ValidationFailed:
        path = self.path(name)
        return ValidationFailed(f"{path} must be {wanted}, got {value}", param=path)


def ignored_fields(body: Any, known: frozenset[str]) -> tuple[str, ...]:
    """
    The fields of a body that are not read, but for those that ask for nothing.

    Args:
        known: what is read. A field that others stand below is looked into; any other
            is read whole.
    """
    inner = {path.rpartition(".")[0].removesuffix("[]") for path in known}
    names = dict.fromkeys(_unread(body, "", known, inner))
    if is_direct_stream(body):
        names.pop("return_progress", None)  # only there it has an effect
    return tuple(names)


def is_direct_stream(body: Mapping[str, Any]) -> bool:
    """Whether an answer is streamed, and not through LiteLLM."""
    return bool(body.get("stream")) and body.get("x_mlx") is None


def _unread(
    value: Any, place: str, known: frozenset[str], inner: set[str]
) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _unread(item, f"{place}[]", known, inner)
    elif isinstance(value, Mapping):
        for name, below in value.items():
            path = f"{place}.{name}" if place else name
            if path not in known:
                if below is not None and below not in DONE_ANYWAY.get(path, NOTHING):
                    yield path
            elif path in inner:
                yield from _unread(below, path, known, inner)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")
