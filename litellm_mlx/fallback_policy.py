"""
Which failures of a local model another one may answer.

LiteLLM's router asks the fallback after every error. A refusal is none of the model's
faults: another model would be sent, and paid for, what this one cannot be asked. One
picture in a group chat would take the whole conversation to a cloud, at each turn.
So would a client's requests above its rate limit. Nor does another model write the
other half of an answer that broke off: of Responses alone LiteLLM would have it so.
What begins too late, is too long, is busy or down still falls back.
"""

import contextlib
import functools
import json
import logging
import re
from collections.abc import AsyncGenerator
from typing import Any

import litellm
from litellm.exceptions import MidStreamFallbackError

from litellm_mlx.errors import PROVIDER
from litellm_mlx.json_objects import as_object
from litellm_mlx.lost_refusals import is_unserved
from litellm_mlx.served_models import OURS

_METHOD = "async_function_with_fallbacks_common_utils"
_OF_RESPONSES = "_aresponses_fallback_attempt"
_FAILURES_BELOW_500 = (408, 429)  # too late, busy
_NOT_IMPLEMENTED = 501
_TOO_LONG = "context_length_exceeded"
_TOO_LONG_MESSAGE = "prompt is too long: "  # of Messages, whose errors have no code
_TOO_OFTEN, _TOO_OFTEN_MESSAGE = "rate_limit_exceeded", "rate limit: "  # the same
# Our provider's, at the end. Bounded, as an error repeats what its client wrote.
_ANSWERED = re.compile(r"\(sidecar answered \d+, (\w++)[^()]*+\)\s*+\Z")
_BODY = re.compile(r"Exception - (?=\{)")  # behind it LiteLLM passes a body on

# In all the ways that LiteLLM passes it on, before the first text of a stream too.
_CANCELLED = ("request_cancelled", "the request was cancelled")

logger = logging.getLogger(__name__)


def is_refusal(error: BaseException, *, is_ours: bool = False) -> bool:
    """
    Whether a local model was asked what it does not do, and no other shall be.

    Args:
        is_ours: the deployment is, though LiteLLM asked it as another provider's.
    """
    text = str(error)
    if any(said in text for said in _CANCELLED):
        return True  # somebody stopped it: nobody else shall answer
    if _is_too_long(error, text):
        return False  # another model may have the room
    if is_unserved(text.encode(errors="replace")):
        return True
    if not is_ours and getattr(error, "llm_provider", None) != PROVIDER:
        return False
    status = getattr(error, "status_code", None)
    if status in _FAILURES_BELOW_500:
        return bool(_says(text, _TOO_OFTEN, _TOO_OFTEN_MESSAGE))
    return isinstance(status, int) and (
        400 <= status < 500 or status == _NOT_IMPLEMENTED
    )


def _is_too_long(error: BaseException, text: str) -> bool:
    """Whether the sidecar says, or LiteLLM by itself, that a prompt is too long."""
    found = _says(text, _TOO_LONG, _TOO_LONG_MESSAGE)
    if found is None:
        return isinstance(error, litellm.ContextWindowExceededError)
    return found


def _says(text: str, code: str, begin: str) -> bool | None:
    """
    Whether the sidecar's answer has a code; None: the text has no answer of its.

    Words do not count: refusals quote what their client has sent.

    Args:
        begin: of the message, where the format has no codes.
    """
    if answered := _ANSWERED.search(text):
        return answered[1] == code
    body = _body_in(text)
    if body is None:
        return None
    fields = as_object(body.get("error"))
    message = str(fields.get("message", ""))
    return fields.get("code") == code or message.startswith(begin)


def _body_in(text: str) -> dict[str, Any] | None:
    """The sidecar's answer, which stands whole in what LiteLLM makes of it."""
    begin = _BODY.search(text)
    if begin is None:
        return None
    try:
        body, _ = json.JSONDecoder().raw_decode(text, begin.end())
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def install() -> None:
    """Have LiteLLM's routers keep refusals. Doing it twice does no harm."""
    original = getattr(litellm.Router, _METHOD, None)
    if original is None:
        logger.warning("this LiteLLM sends refused requests to fallbacks, too")
        return
    if getattr(original, "keeps_refusals", False):
        return

    @functools.wraps(original)
    async def keeping(router: Any, e: Exception, *args: Any, **kwargs: Any) -> Any:
        if is_refusal(e, is_ours=_is_ours(router, e)):
            raise e
        return await original(router, e, *args, **kwargs)

    keeping.keeps_refusals = True  # type: ignore[attr-defined]
    setattr(litellm.Router, _METHOD, keeping)
    _keep_begun_responses()


def _keep_begun_responses() -> None:
    """Have a Responses stream go on with nobody else once its client has some of it."""
    original = getattr(litellm.Router, _OF_RESPONSES, None)
    if original is None:
        logger.warning("this LiteLLM goes on with broken Responses at fallbacks")
        return

    @functools.wraps(original)
    async def keeping(
        router: Any, e: MidStreamFallbackError, source: Any, *args: Any, **named: Any
    ) -> AsyncGenerator[object, None]:
        if getattr(source, "_output_started", False) or e.generated_content:
            raise e.original_exception or e
        async with contextlib.aclosing(
            original(router, e, source, *args, **named)
        ) as elsewhere:
            async for item in elsewhere:
                yield item

    setattr(litellm.Router, _OF_RESPONSES, keeping)


def _is_ours(router: Any, error: Exception) -> bool:
    """Whether a deployment of the sidecar failed: embeddings, Google's chats."""
    failed = getattr(error, "failed_deployment_id", None)
    if not isinstance(failed, str):
        return False
    deployment = None if failed.startswith(OURS) else router.get_deployment(failed)
    model = getattr(getattr(deployment, "litellm_params", None), "model", "")
    return failed.startswith(OURS) or str(model).startswith(f"{PROVIDER}/")
