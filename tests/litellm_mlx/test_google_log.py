"""LiteLLM's own success log of a whole answer on Google's route."""

import asyncio
from datetime import datetime
from typing import Any

import litellm
import pytest
from litellm.integrations.custom_logger import CustomLogger
from litellm.litellm_core_utils.litellm_logging import Logging

import litellm_mlx.provider  # noqa: F401  # as LiteLLM's configuration has it

ANSWER = {
    "candidates": [
        {
            "content": {"parts": [{"text": "Plain."}], "role": "model"},
            "finishReason": "STOP", "index": 0, "safetyRatings": [],
        }
    ],
    "usageMetadata": {
        "promptTokenCount": 7, "candidatesTokenCount": 2, "totalTokenCount": 9,
    },
}  # fmt: skip


class Noting(CustomLogger):  # type: ignore[misc]  # litellm is untyped
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    async def async_log_success_event(
        self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        """Keep the answer."""
        self.told.append(response_obj)


def test_success_callbacks_run_for_googles_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was a ValueError, `httpx_response is None`, and a traceback for each."""
    noting = Noting()
    monkeypatch.setattr(litellm, "_async_success_callback", [noting])
    now = datetime.now()
    log = Logging(
        model="local", messages=[{"role": "user", "content": "hi"}], stream=False,
        call_type="agenerate_content", start_time=now, litellm_call_id="1",
        function_id="1",
    )  # fmt: skip
    log.update_environment_variables(
        optional_params={}, litellm_params={}, model="local"
    )
    asyncio.run(log.async_success_handler(dict(ANSWER), now, now))
    (told,) = noting.told
    assert told.usage.total_tokens == 9
    assert told.choices[0].message.content == "Plain."
