"""Vectors of texts, and scores of documents: lease, encode, give back."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from sidecar.core.errors import BadRequest
from sidecar.core.requests import EmbeddingRequest, RerankRequest
from sidecar.residents.encoder_resident import EncoderResident
from sidecar.residents.model_state import ServedModel
from sidecar.residents.pool import ResidentPool
from sidecar.service.tasks import ending, meant


class EncodingService:
    """Answers requests for embeddings and reranking. Any thread."""

    def __init__(self, pool: ResidentPool[ServedModel], timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s

    def _lease(self, model: str, kind: str) -> AbstractContextManager[ServedModel]:
        name = meant(self._pool, model, kind)
        return self._pool.lease(name, time_left_s=self._timeout_s)

    def embed(
        self, request: EmbeddingRequest, is_connected: Callable[[], bool]
    ) -> tuple[np.ndarray, int]:
        """
        Vectors (inputs, dimensions) of length 1, and the tokens that were read.

        Raises:
            SidecarError: unknown model, or one of another kind; too long; too late.
        """
        with self._lease(request.model, "embedding") as model:
            vectors, num_tokens = _encoder(model, "/v1/embeddings").embed(
                request.inputs,
                ending(self._pool, is_connected, self._timeout_s),
                truncates=request.truncates,
            )
        width, wanted = vectors.shape[1], request.dimensions
        if wanted is None or wanted == width:
            return vectors, num_tokens
        if wanted > width:
            raise BadRequest(
                f"dimensions must be 1..{width} for this model, got {wanted}",
                param="dimensions",
            )
        cut = vectors[:, :wanted]
        lengths = np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12)
        return cut / lengths, num_tokens

    def rerank(
        self, request: RerankRequest, is_connected: Callable[[], bool]
    ) -> tuple[list[float], int]:
        """
        A score for each document, 0..1, and the tokens that were read.

        Raises:
            SidecarError: unknown model, or one of another kind; too long; too late.
        """
        with self._lease(request.model, "reranker") as model:
            return _encoder(model, "/v1/rerank").score(
                request.query,
                request.documents,
                request.instruction,
                ending(self._pool, is_connected, self._timeout_s),
            )


def _encoder(model: ServedModel, path: str) -> EncoderResident:
    if isinstance(model, EncoderResident):
        return model
    raise BadRequest(
        f"{model.name} is a chat model, it does not answer {path}", param="model"
    )
