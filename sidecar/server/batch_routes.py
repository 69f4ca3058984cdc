"""Files and batches over HTTP, and how a request of a batch is answered."""

import logging

from sidecar.core.errors import (
    BadRequest,
    GenerationFailed,
    RequestCancelled,
    SidecarError,
)
from sidecar.core.json_bytes import dump_bytes, load_bytes
from sidecar.dialects.openai_batches import (
    page_of,
    parse_file_page,
    parse_order,
    parse_page,
    parse_upload,
)
from sidecar.server.form_body import parse_form
from sidecar.server.http_messages import (
    EventStream,
    Request,
    Response,
    Router,
    json_response,
)
from sidecar.service.batches.batch_runner import BatchCall, BatchReply
from sidecar.service.batches.batch_service import BatchService
from sidecar.service.batches.stored_files import file_object
from sidecar.service.turn import IGNORED

logger = logging.getLogger(__name__)


class BatchRoutes:
    """Endpoints."""

    def __init__(self, batches: BatchService) -> None:
        self._batches = batches

    def upload(self, request: Request) -> Response:
        """POST /v1/files."""
        form = parse_form(request.headers.get("content-type", ""), request.body)
        asked = parse_upload(form.fields, form.files, form.file_names, form.repeated)
        file = self._batches.upload(request.sender, asked.name, asked.data)
        return json_response(file_object(file))

    def files(self, request: Request) -> Response:
        """GET /v1/files."""
        page = parse_file_page(request.query)
        found = self._batches.files.all(request.sender)
        if page.purpose is not None:
            found = [one for one in found if one.purpose == page.purpose]
        ordered = found[::-1] if page.is_ascending else found
        return json_response(page_of([file_object(one) for one in ordered], page))

    def file(self, request: Request) -> Response:
        """GET /v1/files/ID."""
        found = self._batches.files.find(request.sender, request.tail)
        return json_response(file_object(found))

    def content(self, request: Request) -> Response:
        """GET /v1/files/ID/content."""
        data = self._batches.files.content(request.sender, request.tail)
        return Response(data, content_type="application/octet-stream")

    def delete_file(self, request: Request) -> Response:
        """DELETE /v1/files/ID."""
        self._batches.delete_file(request.sender, request.tail)
        gone = {"id": request.tail, "object": "file", "deleted": True}
        return json_response(gone)

    def create(self, request: Request) -> Response:
        """POST /v1/batches."""
        batch = self._batches.create(request.sender, parse_order(request.json()))
        return json_response(batch.as_json())

    def batches(self, request: Request) -> Response:
        """GET /v1/batches."""
        page = parse_page(request.query)
        found = [batch.as_json() for batch in self._batches.all(request.sender)]
        return json_response(page_of(found, page))

    def batch(self, request: Request) -> Response:
        """GET /v1/batches/ID."""
        found = self._batches.find(request.sender, request.tail)
        return json_response(found.as_json())

    def cancel(self, request: Request) -> Response:
        """POST /v1/batches/ID/cancel."""
        found = self._batches.cancel(request.sender, request.tail)
        return json_response(found.as_json())


def answer_call(routes: Router, call: BatchCall) -> BatchReply:
    """Answer a request of a batch as if it had come by itself."""
    try:
        endpoint, _ = routes.find("POST", call.url)
        request = Request(
            "POST",
            call.url,
            {"content-type": "application/json"},
            _unstored(call),
            call.request_id,
            is_connected=lambda: call.is_wanted,
            batch_owner=call.owner,
            is_batch=True,
        )
        response = endpoint(request)
        if isinstance(response, EventStream):
            response.close()
            raise GenerationFailed("the answer is a stream")
        ignored = response.headers.get(IGNORED, "")
        return BatchReply(response.status, load_bytes(response.body), ignored)
    except SidecarError as error:
        return _problem(routes, error, call)
    except OSError:  # nobody wants it any more
        return _problem(routes, RequestCancelled("the request was cancelled"), call)
    except BaseException:  # a tokenizer's Rust code panics with what is no Exception
        logger.exception("a request of a batch failed path=%s", call.url)
        return _problem(routes, SidecarError("internal error"), call)


def _unstored(call: BatchCall) -> bytes:
    """
    The body, which asks for a whole answer that nobody goes on from.

    Stored responses are few for each key: a batch would push out those of a person.
    """
    body = load_bytes(call.body)
    if body.get("stream"):
        raise BadRequest("stream must be false in a batch", param="stream")
    if body.get("store"):
        raise BadRequest("store must be false in a batch", param="store")
    if call.url != "/v1/responses":
        return call.body
    return dump_bytes({**body, "store": False})


def _problem(routes: Router, error: SidecarError, call: BatchCall) -> BatchReply:
    _, body = routes.problem(error, call.request_id, call.url)
    return BatchReply(error.status_hint, body)
