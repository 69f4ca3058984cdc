"""The provider in LiteLLM's SDK, with no proxy around it."""

import asyncio
import contextlib
import functools
import time
from typing import Any

import litellm
import pytest

import litellm_mlx
from litellm_mlx import client, streams
from tests.litellm_mlx.fake_sidecar import FakeSidecar, wait_until
from tests.litellm_mlx.provider_calls import call_with
from tests.litellm_mlx.proxy_client import CALLS, HI, assert_usage, joined
from tests.litellm_mlx.sidecar_answers import (
    Json,
    Script,
    problem,
    slow_answer,
    text_answer,
)


@pytest.fixture
def sdk(sidecar: FakeSidecar, monkeypatch: pytest.MonkeyPatch) -> Any:
    """LiteLLM in this process, the provider registered as its users do it."""
    provider = {"provider": "mlx", "custom_handler": litellm_mlx.mlx_llm}
    monkeypatch.setattr(litellm, "custom_provider_map", [provider])
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    ours = {"api_base": sidecar.base, "messages": HI, "num_retries": 0}
    return functools.partial(dict, ours)


class TestWithoutProxy:
    def test_sync_stream(self, sdk: Any) -> None:
        """The same chunks as through the proxy."""
        options = {"include_usage": True}
        arguments = sdk(model="mlx/sdk", stream=True, stream_options=options)
        got = joined(list(litellm.completion(**arguments)))
        assert got["reasoning"] == "Let me think."
        assert got["calls"] == CALLS
        assert got["finishes"] == ["tool_calls"]
        assert_usage(got["usage"])

    def test_sync_answer(self, sdk: Any, sidecar: FakeSidecar) -> None:
        """Effort and metadata from LiteLLM's own parameters."""
        arguments = sdk(model="mlx/sdk-n", metadata={"k": "v"}, top_k=3)
        arguments["extra_body"] = {"reasoning_effort": "high"}
        assert_usage(litellm.completion(**arguments).usage)
        body = sidecar.last_call("sdk-n").body
        assert body["x_mlx"]["effort"] == "high"
        assert body["metadata"] == {"k": "v"}
        assert body["top_k"] == 3

    def test_sync_callers_allow_for_themselves(
        self, sdk: Any, sidecar: FakeSidecar
    ) -> None:
        """LiteLLM runs no deployment hook in sync calls."""
        arguments = sdk(model="mlx/sync-effort", reasoning_effort="high")
        with pytest.raises(litellm.UnsupportedParamsError):
            litellm.completion(**arguments)
        litellm.completion(**arguments, allowed_openai_params=["reasoning_effort"])
        assert sidecar.last_call("sync-effort").body["reasoning_effort"] == "high"

    def test_async_stream_and_answer(self, sdk: Any, sidecar: FakeSidecar) -> None:
        """The hook lets reasoning_effort through here as well."""

        async def run() -> Json:
            arguments = sdk(model="mlx/asdk", reasoning_effort="low")
            whole = await litellm.acompletion(**arguments)
            assert_usage(whole.usage)
            stream = await litellm.acompletion(**arguments, stream=True)
            return joined([c async for c in stream])

        got = asyncio.run(run())
        assert got["text"] == "I will look."
        assert got["finishes"] == ["tool_calls"]
        assert sidecar.last_call("asdk").body["reasoning_effort"] == "low"

    def test_each_event_loop_gets_a_client(self, sdk: Any) -> None:
        """A second asyncio.run does not meet the first one's sockets."""
        for _ in range(3):
            asyncio.run(litellm.acompletion(**sdk(model="mlx/loops")))

    def test_an_early_refusal_raises_from_the_call_itself(
        self, sdk: Any, sidecar: FakeSidecar
    ) -> None:
        """Not at the first chunk, sync and async."""
        refusal = problem(400, "context_length_exceeded", "too long")
        arguments = sdk(model="mlx/" + sidecar.on("sdk-ctx", refusal), stream=True)
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**arguments)
        with pytest.raises(litellm.ContextWindowExceededError):
            asyncio.run(litellm.acompletion(**arguments))

    def test_a_call_made_on_the_loop_that_sends_it_does_not_wait(
        self, sidecar: FakeSidecar, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The loop would stand still, and the verdict never come."""
        monkeypatch.setattr(streams, "EAGER_WAIT_S", 30.0)
        call = call_with(model="on-the-loop", api_base=sidecar.base)

        async def run() -> Json:
            chunks = streams.open_async(call, asyncio.get_running_loop())
            return joined([chunk async for chunk in chunks])

        started = time.monotonic()
        assert asyncio.run(run())["text"] == "I will look."
        assert time.monotonic() - started < 30

    def test_a_call_of_an_unknown_loop_is_sent_at_the_first_chunk(
        self, sidecar: FakeSidecar
    ) -> None:
        """Made on a thread of its own, where the hook did not run."""
        call = call_with(model="no-loop", api_base=sidecar.base)

        async def run() -> Json:
            chunks = await asyncio.to_thread(streams.open_async, call, None)
            return joined([chunk async for chunk in chunks])

        assert asyncio.run(run())["text"] == "I will look."

    def test_a_sync_stream_given_up_is_cancelled(
        self, sdk: Any, sidecar: FakeSidecar
    ) -> None:
        """Closing the generator posts the cancel."""
        sidecar.on("sync-gone", Script(steps=slow_answer("sync-gone")))
        call: Any = sdk(model="sync-gone", optional_params={}, litellm_params={})
        stream = litellm_mlx.mlx_llm.streaming(**call)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        wait_until(lambda: sidecar.is_cancelled("sync-gone"))

    @pytest.mark.parametrize("num_chunks", [0, 2])
    def test_an_async_stream_dropped_is_cancelled(
        self, sdk: Any, sidecar: FakeSidecar, num_chunks: int
    ) -> None:
        """Even one that nobody ever asked for a chunk."""
        model = f"dropped-{num_chunks}"
        sidecar.on(model, Script(steps=slow_answer(model)))

        async def run() -> None:
            stream = await litellm.acompletion(**sdk(model=f"mlx/{model}", stream=True))
            chunks = stream.completion_stream
            for _ in range(num_chunks):
                await anext(chunks)
            stream.completion_stream = None
            del chunks
            await asyncio.to_thread(wait_until, lambda: sidecar.is_cancelled(model))

        asyncio.run(run())

    @pytest.mark.parametrize("stream", [True, False])
    def test_a_cancelled_task_cancels_the_call(
        self, sdk: Any, sidecar: FakeSidecar, stream: bool
    ) -> None:
        """While the sidecar has not answered yet."""
        model = f"cancelled-{stream}"
        sidecar.on(model, Script(wait_s=1.5, steps=text_answer(model, "late")))

        async def run() -> None:
            call = litellm.acompletion(**sdk(model=f"mlx/{model}", stream=stream))
            task = asyncio.create_task(call)
            await asyncio.to_thread(wait_until, lambda: sidecar.calls_for(model))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_until, lambda: sidecar.is_cancelled(model))

        asyncio.run(run())


def test_the_package_exports_the_provider() -> None:
    """And nothing else; LiteLLM finds it by its full name."""
    from litellm_mlx.provider import mlx_llm

    assert litellm_mlx.mlx_llm is mlx_llm
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        litellm_mlx.nothing  # noqa: B018


class TestConfiguredProxy:
    """A proxy in the environment is for the internet, not for this machine."""

    @pytest.fixture(autouse=True)
    def _dead_proxy(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        client._sync_client.cache_clear()
        yield
        client._sync_client.cache_clear()

    def test_a_sync_call_goes_straight_to_the_sidecar(self, sdk: Any) -> None:
        assert litellm.completion(**sdk(model="mlx/no-proxy")).choices

    def test_an_async_call_goes_straight_to_the_sidecar(self, sdk: Any) -> None:
        answer = asyncio.run(litellm.acompletion(**sdk(model="mlx/no-proxy-async")))
        assert answer.choices
