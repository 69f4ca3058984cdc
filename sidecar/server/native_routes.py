"""What a model does beside chats, over HTTP, and the device's memory by hand."""

from sidecar.core.requests import join_names
from sidecar.dialects.native import (
    attention_arrays,
    attention_object,
    batch_list,
    classified_list,
    parse_attention,
    parse_batch,
    parse_classify,
    parse_limits,
    parse_train,
)
from sidecar.engine.native.memory_controls import MemoryControls
from sidecar.server import query
from sidecar.server.http_messages import (
    Request,
    Response,
    facts_of,
    json_response,
)
from sidecar.service.native import NativeService
from sidecar.service.training import TrainingService
from sidecar.service.turn import IGNORED


class NativeRoutes:
    """Endpoints; those of memory and device are guarded by the router."""

    def __init__(
        self, native: NativeService, training: TrainingService, memory: MemoryControls
    ) -> None:
        self._native, self._training, self._memory = native, training, memory

    def classify(self, request: Request) -> Response:
        """POST /native/classify."""
        asked = parse_classify(request.json(), facts_of(request))
        found = self._native.classify(asked, request.is_connected)
        return json_response(classified_list(asked.model, found))

    def batch_generate(self, request: Request) -> Response:
        """POST /native/batch_generate."""
        asked = parse_batch(request.json(), facts_of(request))
        answers = self._native.batch_generate(asked, request.is_connected)
        names = asked.first.ignored
        headers = {IGNORED: join_names(names)} if names else {}
        return json_response(batch_list(asked, answers), headers=headers)

    def attention(self, request: Request) -> Response:
        """POST /native/attention."""
        asked = parse_attention(request.json(), facts_of(request))
        facts, keys = self._native.inspect(asked, request.is_connected)
        if not asked.as_arrays:
            return json_response(attention_object(facts, keys))
        body = attention_arrays(facts, keys)
        return Response(body, content_type="application/octet-stream")

    def train(self, request: Request) -> Response:
        """POST /native/train."""
        training = self._training.begin(parse_train(request.json()))
        return json_response(training.as_json(), 202)

    def trainings(self, request: Request) -> Response:
        """GET /native/train."""
        found = [training.as_json() for training in self._training.all()]
        return json_response({"trainings": found})

    def training(self, request: Request) -> Response:
        """GET /native/train/ID."""
        return json_response(self._training.find(request.tail).as_json())

    def cancel_training(self, request: Request) -> Response:
        """DELETE /native/train/ID: it ends before its next step."""
        return json_response(self._training.cancel(request.tail).as_json())

    def memory(self, request: Request) -> Response:
        """GET /native/memory."""
        return json_response(self._memory.use())

    def change_memory(self, request: Request) -> Response:
        """POST /native/memory."""
        previous = self._memory.change(parse_limits(request.json()))
        return json_response({"previous": previous})

    def clear_memory(self, request: Request) -> Response:
        """POST /native/memory/clear."""
        query.given(request, ())
        query.require_no_body(request)
        return json_response({"freed_bytes": self._memory.clear()})

    def reset_peak(self, request: Request) -> Response:
        """POST /native/memory/reset_peak."""
        return json_response({"previous_peak_bytes": self._memory.reset_peak()})

    def device(self, request: Request) -> Response:
        """GET /native/device."""
        return json_response(self._memory.device())
