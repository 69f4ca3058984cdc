"""Typed reading: every complaint names the field, its path and the range."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from sidecar.core.errors import BadRequest, SidecarError, ValidationFailed
from sidecar.dialects.fields import Fields

Read = Callable[[Fields], object]

READERS: dict[str, tuple[Read, tuple[object, ...], tuple[object, ...]]] = {
    # name -> reader of field "x", values it takes, values of a wrong type
    "text": (lambda f: f.text("x"), ("", "a"), (1, True, [], {})),
    "required_text": (lambda f: f.required_text("x"), ("a",), ("", 1, [], None)),
    "boolean": (lambda f: f.boolean("x", False), (True, False), (1, "true", [])),
    "number": (
        lambda f: f.number("x", 0, 2),
        (0, 2, 0.5),
        ("1", True, [], {}),
    ),
    "integer": (
        lambda f: f.integer("x", 0, 2),
        (0, 2, 1.0),
        ("1", True, 0.5, [], {}),
    ),
    "object": (lambda f: f.object("x"), ({}, {"a": 1}), ([], "a", 1, True)),
    "items": (lambda f: f.items("x"), ([], [1, "a"]), ({}, "a", 1, True)),
}


def complaint(read: Read, body: Any) -> SidecarError:
    with pytest.raises(SidecarError) as caught:
        read(Fields(body))
    return caught.value


@pytest.mark.parametrize("name", READERS)
def test_reader_takes_its_type(name: str) -> None:
    """A value of the right type and range comes back as it is."""
    read, good, _ = READERS[name]
    for value in good:
        assert read(Fields({"x": value})) == value


@pytest.mark.parametrize("name", READERS)
def test_reader_refuses_other_types(name: str) -> None:
    """Any other type is a BadRequest that names the field."""
    read, _, bad = READERS[name]
    for value in bad:
        error = complaint(read, {"x": value})
        assert type(error) is BadRequest
        assert error.param == "x"
        assert error.message.startswith("x must be")


@pytest.mark.parametrize("name", [n for n in READERS if n != "required_text"])
def test_null_counts_as_absent(name: str) -> None:
    """null and a missing field read the same."""
    read, _, _ = READERS[name]
    assert read(Fields({"x": None})) == read(Fields({}))


@pytest.mark.parametrize("value", [-1, 3, 1e300, -1e-9, math.inf, math.nan])
def test_out_of_range_names_the_range(value: float) -> None:
    """A number beyond its limits is a 422 with field and range; NaN as well."""
    error = complaint(lambda f: f.number("x", 0, 2), {"x": value})
    assert isinstance(error, ValidationFailed)
    assert (error.param, error.status_hint) == ("x", 422)
    assert "x must be 0..2" in error.message


def test_paths_lead_to_the_place() -> None:
    """A fault deep inside is named by its whole path."""
    body = {"a": [{}, {"b": 7}]}
    items = list(Fields(body).objects("a"))
    with pytest.raises(BadRequest) as caught:
        items[1].text("b")
    assert caught.value.param == "a[1].b"
    with pytest.raises(BadRequest) as caught:
        list(Fields({"a": [{}, 3]}).objects("a"))
    assert caught.value.param == "a[1]"
    assert caught.value.message == "a[1] must be an object, got a number"


@pytest.mark.parametrize("body", [[], "text", 3, None, True])
def test_a_body_that_is_no_object(body: object) -> None:
    """The whole body must be an object."""
    with pytest.raises(BadRequest, match="the body must be an object"):
        Fields(body)
