"""
The `mlx` provider: LiteLLM's hooks, each one translate, send, translate back.

Named in a LiteLLM configuration as `litellm_mlx.provider.mlx_llm`. LiteLLM may load
this file outside its package, so imports are absolute.
"""

from collections.abc import Iterator
from typing import TypeAlias

from litellm import EmbeddingResponse, ModelResponse, TextCompletionResponse
from litellm.llms.custom_llm import CustomLLM
from litellm.types.utils import ModelResponseStream

from litellm_mlx import (
    client,
    fallback_policy,
    google_errors,
    google_log,
    google_stream,
    handlers_folder,
    hook,
    ignored_header,
    image_sizes,
    litellm_patterns,
    proxy_gate,
    quiet_log,
    streams,
    token_counter,
)
from litellm_mlx.file_limit import raise_file_limit
from litellm_mlx.settings import ask_this_machine_directly, current_settings
from litellm_mlx.translate import (
    chat_call,
    completion_from,
    embedding_call,
    embeddings_from,
)

Answer: TypeAlias = ModelResponse | TextCompletionResponse


class MLXProvider(CustomLLM):  # type: ignore[misc]  # litellm is untyped
    """
    Chat and embeddings on a local sidecar.

    LiteLLM passes about 17 keyword arguments to each hook, and more with each release;
    they are taken as one mapping.
    """

    def completion(self, **call: object) -> Answer:
        """Answer a request in one piece."""
        request = chat_call(call, current_settings(), stream=False)
        response = client.send_sync(request, stream=False)
        return completion_from(response, request.model)

    async def acompletion(self, **call: object) -> Answer:
        """Answer a request in one piece; cancelling the task cancels the work."""
        request = chat_call(call, current_settings(), stream=False)
        response = await client.send(request)
        ignored_header.note(call, response.headers)
        return completion_from(response, request.model)

    def streaming(self, **call: object) -> Iterator[ModelResponseStream]:
        """Answer a chat request chunk by chunk."""
        return streams.open_sync(chat_call(call, current_settings(), stream=True))

    def astreaming(self, **call: object) -> streams.AsyncChunks:
        """
        Answer a chat request chunk by chunk.

        No coroutine: LiteLLM calls it in an executor thread, and what it raises there
        still counts as the call's own failure.
        """
        request = chat_call(call, current_settings(), stream=True)
        chunks = streams.open_async(request, hook.calling_loop())
        ignored_header.note(call, chunks.headers)
        return chunks

    def embedding(self, **call: object) -> EmbeddingResponse:
        """Embed texts."""
        request = embedding_call(call, current_settings())
        response = client.send_sync(request, stream=False)
        return embeddings_from(response, request.model)

    async def aembedding(self, **call: object) -> EmbeddingResponse:
        """Embed texts."""
        request = embedding_call(call, current_settings())
        response = await client.send(request)
        return embeddings_from(response, request.model)


ask_this_machine_directly()
handlers_folder.install()
hook.register()
fallback_policy.install()
google_errors.install()
google_log.install()
google_stream.install()
image_sizes.install()
proxy_gate.install()
quiet_log.install()
litellm_patterns.install()
token_counter.install()
raise_file_limit()  # LiteLLM may have been started without the launcher
mlx_llm = MLXProvider()
