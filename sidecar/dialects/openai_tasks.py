"""Embeddings as OpenAI has them, and reranking as Jina and Cohere do."""

import base64
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from sidecar.core.errors import BadRequest
from sidecar.core.requests import EmbeddingRequest, RerankRequest
from sidecar.dialects.fields import Fields
from sidecar.dialects.openai_completions import is_id

MAX_INPUTS = 2048
MAX_DOCUMENTS = 1000
_MAX_DIMENSIONS = 65536


def parse_embedding(body: Any) -> EmbeddingRequest:
    """
    Check a body.

    Raises:
        BadRequest, ValidationFailed: naming the field.
    """
    fields = Fields(body)
    form = fields.text("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise BadRequest(
            f"encoding_format must be float or base64, got {form[:40]!r}",
            param="encoding_format",
        )
    return EmbeddingRequest(
        model=fields.text("model") or "",
        inputs=_inputs(fields.raw("input")),
        dimensions=fields.integer("dimensions", 1, _MAX_DIMENSIONS),
        as_base64=form == "base64",
        truncates=fields.boolean("truncate", False),
    )


def embedding_list(
    request: EmbeddingRequest, vectors: np.ndarray, num_tokens: int
) -> dict[str, Any]:
    """The body of an answer; vectors: (inputs, dimensions), float32."""
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, request)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": request.model, "usage": usage}


def parse_rerank(body: Any) -> RerankRequest:
    """
    Check a body.

    Raises:
        BadRequest, ValidationFailed: naming the field.
    """
    fields = Fields(body)
    listed = fields.raw("documents")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_DOCUMENTS:
        raise BadRequest(
            f"documents must be a list of 1..{MAX_DOCUMENTS} texts", param="documents"
        )
    return RerankRequest(
        model=fields.text("model") or "",
        query=fields.required_text("query"),
        documents=tuple(_document(item, i) for i, item in enumerate(listed)),
        top_n=fields.integer("top_n", 1, 1 << 31),
        instruction=fields.text("instruction"),
        with_documents=fields.boolean("return_documents", False),
    )


def rerank_list(
    request: RerankRequest, scores: Sequence[float], num_tokens: int
) -> dict[str, Any]:
    """The body of an answer: the best first, equal ones in their order."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    results: list[dict[str, Any]] = []
    for index in order[: request.top_n]:
        row: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if request.with_documents:
            row["document"] = {"text": request.documents[index]}
        results.append(row)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {
        "id": f"rerank-{secrets.token_hex(12)}",
        "model": request.model,
        "results": results,
        "usage": usage,
    }


def _inputs(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and value and all(map(is_id, value)):
        value = [value]
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_INPUTS:
        raise BadRequest(
            f"input must be a text, or a list of 1..{MAX_INPUTS} texts or lists of "
            "token ids",
            param="input",
        )
    return tuple(_input(item, f"input[{index}]") for index, item in enumerate(value))


def _input(item: Any, path: str) -> str | tuple[int, ...]:
    if isinstance(item, str) and item:
        return item
    if isinstance(item, list) and item and all(map(is_id, item)):
        return tuple(item)
    raise BadRequest(
        f"{path} must be a text that is not empty, or token ids", param=path
    )


def _document(item: Any, index: int) -> str:
    path = f"documents[{index}]"
    if isinstance(item, dict):
        item, path = item.get("text"), f"{path}.text"
    if isinstance(item, str) and item:
        return item
    raise BadRequest(f"{path} must be a text that is not empty", param=path)


def _encoded(vector: np.ndarray, request: EmbeddingRequest) -> str | list[float]:
    if request.as_base64:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(number) for number in vector]
