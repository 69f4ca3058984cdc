"""Errors on the wire: RFC 9457 and OpenAI in one body."""

from collections.abc import Iterator

import pytest

from sidecar.core import errors
from sidecar.core.errors import SidecarError
from sidecar.dialects.problem import error_object, problem


def tree(root: type[SidecarError]) -> Iterator[type[SidecarError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


ALL = list(tree(SidecarError))


@pytest.mark.parametrize("kind", ALL)
def test_each_error_has_a_whole_body(kind: type[SidecarError]) -> None:
    """All fields of both forms, and they agree."""
    body = problem(kind("what went wrong", param="n"), "req-1", "/v1/x")
    assert body["type"] == f"urn:litellm-mlx:{kind.code}"
    assert body["status"] == kind.status_hint
    assert body["detail"] == body["error"]["message"] == "what went wrong"
    assert body["error_code"] == body["error"]["code"] == kind.code
    assert (body["instance"], body["request_id"]) == ("/v1/x", "req-1")
    assert body["error"]["param"] == "n"
    assert set(body["error"]) == {"message", "type", "code", "param"}


@pytest.mark.parametrize("kind", ALL)
def test_each_error_stands_in_the_drawn_tree(kind: type[SidecarError]) -> None:
    """The picture in core/errors names each class with its code and status."""
    lines = [line.split() for line in (errors.__doc__ or "").splitlines()]
    if kind is not SidecarError:
        wanted = [kind.__name__, kind.code, str(kind.status_hint)]
        assert any(line[-3:] == wanted for line in lines)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (408, "invalid_request_error"),
        (413, "invalid_request_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_openai_clients_get_the_type_they_know(status: int, kind: str) -> None:
    """error.type follows the status."""
    found = [e for e in ALL if e.status_hint == status]
    assert found
    assert all(error_object(error("x"))["type"] == kind for error in found)


def test_a_value_out_of_range_lists_its_field() -> None:
    """422 carries `errors` with field and message."""
    error = errors.ValidationFailed("n must be 1..8, got 9", param="n")
    assert problem(error, "r", "/")["errors"] == [
        {"field": "n", "message": "n must be 1..8, got 9", "type": "value_error"}
    ]
    assert "errors" not in problem(errors.BadRequest("x"), "r", "/")
