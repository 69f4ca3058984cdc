"""A sidecar with adapters of a dense, a hybrid and a 4-bit model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.engine.gpu_thread import gpu_thread
from testkit.servers import running_sidecar
from testkit.tiny_adapters import make_adapter, plain_answers, quantized
from testkit.tiny_models import make_model

Json = dict[str, Any]
MAX_TOKENS = 10
BASES = ("dense", "hybrid", "four-bit")
_OWN = {  # of each base: rank, projections, blocks
    "a": (4, ("self_attn.q_proj", "self_attn.v_proj"), -1),
    "b": (8, ("self_attn.q_proj", "self_attn.v_proj"), -1),
    "c": (2, ("self_attn.o_proj", "mlp.down_proj"), -1),
    "d": (16, ("self_attn.q_proj", "mlp.up_proj"), 1),
    "e": (3, ("self_attn.k_proj", "self_attn.v_proj"), -1),
}


@dataclass
class Served:
    """A running sidecar, its folders, and what mlx-lm says in its place."""

    app: App
    root: Path
    _answers: dict[tuple[str, str], Callable[..., list[int]]] = field(
        default_factory=dict
    )

    @property
    def adapters(self) -> Path:
        """ADAPTER_DIR."""
        return self.root / "adapters"

    def ask(self, **body: Any) -> httpx.Response:
        """A raw completion, greedy."""
        whole = {"temperature": 0, "max_tokens": MAX_TOKENS, "logprobs": 0, **body}
        return httpx.post(f"{self.app.url}/v1/completions", json=whole, timeout=120)

    def tokens(self, base: str, adapter: str, ids: Sequence[int], **more: Any) -> Json:
        """The tokens of an answer, each as text, and how many were cached."""
        named = {"adapter": f"{base}-{adapter}"} if adapter else {}
        answer = self.ask(model=base, prompt=list(ids), **named, **more)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        details = body["usage"]["prompt_tokens_details"]
        tokens = body["choices"][0]["logprobs"]["tokens"]
        return {"tokens": tokens, "cached": details["cached_tokens"]}

    def plain(
        self, base: str, adapter: str, ids: Sequence[int], count: int = MAX_TOKENS
    ) -> list[str]:
        """What mlx-lm says, with the adapter loaded into a model of its own."""
        name = (base, adapter)
        if name not in self._answers:
            folder = self.adapters / f"{base}-{adapter}" if adapter else None
            model = self.root / "models" / base
            self._answers[name] = gpu_thread().call(
                lambda: plain_answers(model, folder)
            )
        answer = self._answers[name]
        said = gpu_thread().call(lambda: answer(ids, count))
        with self.app.pool.lease(base) as served:
            tokenizer = served.engine.model.tokenizer
        return [tokenizer.decode([one]) for one in said]


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("adapters")
    models, adapters = root / "models", root / "adapters"
    for kind in ("dense", "hybrid"):
        make_model(models / kind, kind)

    def make() -> None:
        quantized(models / "dense", models / "four-bit")
        for base in BASES:
            for seed, (name, own) in enumerate(_OWN.items()):
                rank, keys, num_layers = own
                make_adapter(
                    adapters / f"{base}-{name}", models / base, seed=seed,
                    rank=rank, keys=keys, num_layers=num_layers, base=base,
                )  # fmt: skip

    gpu_thread().call(make)
    named = {"MODEL_DIR": str(models), "MODEL_PATH": str(models / "dense"),
             "ADAPTER_DIR": str(adapters)}  # fmt: skip
    with running_sidecar(named) as app:
        yield Served(app, root)
