"""
Every error a client may see.

SidecarError                    code                      status
 +- BadRequest                  invalid_request           400
 |   +- ContextLengthExceeded   context_length_exceeded   400
 |   +- UnsupportedSchema       unsupported_schema        400
 |   +- PreviousResponseNotFound  previous_response_not_found  400
 |   +- ThreadUnsupported       thread_unsupported_request  400
 |   +- UnsupportedContent      unsupported_content       400
 |   +- ImageFetchFailed        image_fetch_failed        400
 +- Unauthorized                unauthorized              401
 +- Forbidden                   forbidden                 403
 +- NotFound                    resource_not_found        404
 |   +- ModelNotFound           model_not_found           404
 |   +- AdapterNotFound         adapter_not_found         404
 +- MethodNotAllowed            method_not_allowed        405
 +- RequestTimeout              request_timeout           408
 +- ModelBusy                   model_busy                409
 +- ModelPinned                 model_pinned              409
 +- PayloadTooLarge             payload_too_large         413
 +- ValidationFailed            validation_error          422
 +- AnswerInvalid               answer_invalid            422
 +- Busy                        rate_limited              429
 +- RateLimitExceeded           rate_limit_exceeded       429
 +- HeadersTooLarge             headers_too_large         431
 +- RequestCancelled            request_cancelled         499
 +- GenerationFailed            generation_error          500
 +- ModelLoadFailed             model_load_failed         500
 +- Unavailable                 service_unavailable       503
     +- ServingPaused           training                  503
     +- InsufficientMemory      insufficient_memory       503
     +- MemoryPressure          memory_pressure           503
     +- ModelTooLarge           model_too_large           503
     +- TooSlow                 too_slow                  503

Anything else that escapes is a defect and becomes internal_error 500 at the
handler's edge. Messages name the field and its range; they hold no prompt text,
no key and no path.
"""

from typing import ClassVar

GOING_DOWN = "the server is shutting down"


class SidecarError(Exception):
    """
    Base of all errors that have a place on the wire.

    Args:
        message: what went wrong, for the client's user.
        param: the request field at fault, if one is.
        retry_after_s: when a repeat may succeed, for 429 and 503.
    """

    code: ClassVar[str] = "internal_error"
    status_hint: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(SidecarError):
    """A field is missing, of the wrong type or out of range."""

    code = "invalid_request"
    status_hint = 400


class UnsupportedSchema(BadRequest):
    """A schema or pattern that an answer cannot be held to."""

    code = "unsupported_schema"


class ContextLengthExceeded(BadRequest):
    """
    The prompt alone fills the context.

    Args:
        num_tokens: how many tokens it has, or has at the least.
    """

    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, param: str | None = "messages", num_tokens: int = 0
    ) -> None:
        super().__init__(message, param=param)
        self.num_tokens = num_tokens


class PreviousResponseNotFound(BadRequest):
    """A response or item that was never stored, or is not kept any more."""

    code = "previous_response_not_found"


class ThreadUnsupported(BadRequest):
    """A conversation that the server is to keep; it keeps none of Messages."""

    code = "thread_unsupported_request"


class UnsupportedContent(BadRequest):
    """Content of a kind that the model, or the place it stands in, does not take."""

    code = "unsupported_content"


class ImageFetchFailed(BadRequest):
    """An image could not be got from where the request says it is."""

    code = "image_fetch_failed"


class Unauthorized(SidecarError):
    """No key, or a wrong one."""

    code = "unauthorized"
    status_hint = 401


class Forbidden(SidecarError):
    """This origin or host name may not come in."""

    code = "forbidden"
    status_hint = 403


class NotFound(SidecarError):
    """No such path or object."""

    code = "resource_not_found"
    status_hint = 404


class ModelNotFound(NotFound):
    """No served model has that name."""

    code = "model_not_found"


class AdapterNotFound(NotFound):
    """No adapter of that name is served."""

    code = "adapter_not_found"


class MethodNotAllowed(SidecarError):
    """The path exists, the method does not."""

    code = "method_not_allowed"
    status_hint = 405


class RequestTimeout(SidecarError):
    """The client or the generation took longer than its limit."""

    code = "request_timeout"
    status_hint = 408


class ModelBusy(SidecarError):
    """Requests hold the model, and it is not to be waited for them."""

    code = "model_busy"
    status_hint = 409


class ModelPinned(SidecarError):
    """The model stays until it is unpinned, or forced out."""

    code = "model_pinned"
    status_hint = 409


class PayloadTooLarge(SidecarError):
    """The body is above MAX_BODY_MB."""

    code = "payload_too_large"
    status_hint = 413


class ValidationFailed(SidecarError):
    """A value is of the right type and out of its range."""

    code = "validation_error"
    status_hint = 422


class AnswerInvalid(SidecarError):
    """
    The model wrote what its request's schema does not allow, twice.

    Args:
        path: where in the answer, from `$`, the whole.
    """

    code = "answer_invalid"
    status_hint = 422

    def __init__(
        self, message: str, *, param: str | None = None, path: str = "$"
    ) -> None:
        super().__init__(message, param=param)
        self.path = path


class Busy(SidecarError):
    """The queue is full."""

    code = "rate_limited"
    status_hint = 429


class RateLimitExceeded(SidecarError):
    """A client has asked for more than it may within a minute."""

    code = "rate_limit_exceeded"
    status_hint = 429


class HeadersTooLarge(SidecarError):
    """The request head is above its limit."""

    code = "headers_too_large"
    status_hint = 431


class RequestCancelled(SidecarError):
    """Somebody posted /v1/cancel for it."""

    code = "request_cancelled"
    status_hint = 499


class GenerationFailed(SidecarError):
    """The engine raised while it worked on this request."""

    code = "generation_error"
    status_hint = 500


class ModelLoadFailed(SidecarError):
    """The model could not be loaded."""

    code = "model_load_failed"
    status_hint = 500


class Unavailable(SidecarError):
    """Loading, draining or out of memory: another server may serve this now."""

    code = "service_unavailable"
    status_hint = 503


class ServingPaused(Unavailable):
    """An adapter is trained that has the server for itself."""

    code = "training"


class InsufficientMemory(Unavailable):
    """A prompt or a model does not fit; the message says what would."""

    code = "insufficient_memory"


class MemoryPressure(Unavailable):
    """The process is at its limit."""

    code = "memory_pressure"


class ModelTooLarge(Unavailable):
    """The model does not fit, not even alone."""

    code = "model_too_large"


class TooSlow(Unavailable):
    """The answer would begin later than the request allows."""

    code = "too_slow"
