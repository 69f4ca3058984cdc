"""What stands behind the `?` of an address: names that are known, each once."""

from urllib.parse import parse_qs

from sidecar.core.errors import BadRequest
from sidecar.server.http_messages import Request

_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no")


def given(request: Request, known: tuple[str, ...]) -> dict[str, str]:
    """
    What the query says.

    Raises:
        BadRequest: a name is unknown, or given twice.
    """
    found = parse_qs(request.query, keep_blank_values=True)
    for name, values in found.items():
        if name not in known:
            names = f"one of {', '.join(known)}" if known else "known here"
            raise BadRequest(f"{name[:64]} is not {names}", param=name[:64])
        if len(values) > 1:
            raise BadRequest(f"{name} may be given once", param=name)
    return {name: values[0] for name, values in found.items()}


def flag(request: Request, name: str, known: tuple[str, ...] = ()) -> bool:
    """
    Whether the query asks for something; beside it these names are known.

    Raises:
        BadRequest: it says something else than yes or no.
    """
    value = given(request, (name, *known)).get(name, "no").lower()
    if value not in (*_TRUE, *_FALSE):
        raise BadRequest(f"{name} must be true or false", param=name)
    return value in _TRUE


def require_no_body(request: Request, instead: str = "") -> None:
    """
    Refuse a body that would have no effect; an empty object is none.

    Args:
        instead: where what it asks for is said.
    """
    if request.body.strip() and request.json() != {}:
        raise BadRequest(f"the body must be empty{instead and ': '}{instead}")
