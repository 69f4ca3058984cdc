"""Adapters that become part of a model: DoRA, those of experts, whole weights."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from sidecar.app import App
from sidecar.engine.gpu_thread import gpu_thread
from testkit.raw_http import eventually
from testkit.servers import running_sidecar
from testkit.tiny_adapters import make_adapter, plain_answers, quantized
from testkit.tiny_models import make_model

IDS = [7 * n % 997 + 5 for n in range(300)]
EXPERTS = ("mlp.switch_mlp.gate_proj", "mlp.switch_mlp.down_proj")


@dataclass(frozen=True, slots=True)
class Applied:
    """A server of these models; `root` has adapters beside them."""

    app: App
    root: Path

    def load(self, name: str, adapter: Path | None) -> httpx.Response:
        """Read a model anew, with an adapter or without."""
        self.set(name, adapter).raise_for_status()
        return self.reload(name)

    def set(self, name: str, adapter: Path | None) -> httpx.Response:
        """Name the adapter of a model from its next load on."""
        body = {"adapter_path": None if adapter is None else str(adapter)}
        url = f"{self.app.url}/admin/models/{name}/settings"
        return httpx.post(url, json=body, timeout=60)

    def reload(self, name: str) -> httpx.Response:
        """Read a model anew."""
        url = f"{self.app.url}/admin/models/{name}"
        httpx.post(f"{url}/unload?force=true", json={}, timeout=60)
        return httpx.post(f"{url}/load", json={}, timeout=120)

    def ask(self, model: str, ids: Sequence[int], **more: object) -> httpx.Response:
        """A raw completion, greedy."""
        body = {"model": model, "prompt": list(ids), "max_tokens": 24, "logprobs": 0,
                "temperature": 0, **more}  # fmt: skip
        return httpx.post(f"{self.app.url}/v1/completions", json=body, timeout=120)

    def said(self, model: str, ids: Sequence[int]) -> tuple[list[str], int]:
        """The tokens of an answer as text, and how many of the prompt were cached."""
        answer = self.ask(model, ids)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return body["choices"][0]["logprobs"]["tokens"], cached

    def plain(self, model: str, adapter: Path | None, ids: Sequence[int]) -> list[str]:
        """What mlx-lm says, cold."""
        folder = self.root / "models" / model

        def answer() -> list[int]:
            return plain_answers(folder, adapter)(ids, 24)

        said = gpu_thread().call(answer)
        with self.app.pool.lease(model) as resident:
            model_read = resident.engine.model
        decode = model_read.tokenizer.decode
        stops = model_read.stop_ids
        end = next((n for n, i in enumerate(said) if i in stops), len(said))
        return [decode([i]) for i in said[:end]]


def _full(out: Path, model: Path) -> Path:
    """All weights of a projection, other ones; GPU thread only."""
    network = load_model(model)[0]
    weights = {
        name: array + 0.1 * mx.random.normal(array.shape)
        for name, array in tree_flatten(network.parameters())
        if name.endswith("q_proj.weight")
    }
    out.mkdir(parents=True)
    mx.save_safetensors(str(out / "adapters.safetensors"), weights)
    (out / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "full"}))
    return out


@pytest.fixture(scope="module")
def applied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Applied]:
    root = tmp_path_factory.mktemp("applied")
    models, adapters = root / "models", root / "adapters"
    for kind in ("dense", "hybrid", "experts"):
        make_model(models / kind, kind)

    def make() -> None:
        quantized(models / "dense", models / "four-bit")
        for base in ("dense", "four-bit", "hybrid"):
            make_adapter(root / f"{base}-dora", models / base, seed=3, kind="dora")
        make_adapter(root / "experts-lora", models / "experts", seed=4, keys=EXPERTS)
        make_adapter(adapters / "plain", models / "dense", seed=5)
        _full(root / "dense-full", models / "dense")

    gpu_thread().call(make)
    named = {"MODEL_DIR": str(models), "MODEL_PATH": str(models / "dense"),
             "ADAPTER_DIR": str(adapters), "KV_DISK_PERSISTENCE": "true",
             "KV_DISK_MIN_PREFIX_TOKENS": "64"}  # fmt: skip
    with running_sidecar(named) as app:
        yield Applied(app, root)


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        ("dense", "dense-dora"),
        ("four-bit", "four-bit-dora"),
        ("hybrid", "hybrid-dora"),
        ("experts", "experts-lora"),
        ("dense", "dense-full"),
    ],
)
def test_it_is_another_model(applied: Applied, model: str, adapter: str) -> None:
    """It says what mlx-lm says with it; neither reads the other's KV."""
    folder = applied.root / adapter
    assert applied.load(model, None).status_code == 200
    bare = applied.plain(model, None, IDS)
    assert applied.said(model, IDS)[0] == bare
    assert applied.load(model, folder).status_code == 200
    wanted = applied.plain(model, folder, IDS)
    assert wanted != bare
    assert applied.said(model, IDS) == (wanted, 0)
    further = [*IDS, 11, 12]
    found, cached = applied.said(model, further)
    assert found == applied.plain(model, folder, further)
    assert cached > 200
    assert applied.load(model, None).status_code == 200
    found, cached = applied.said(model, further)
    assert found == applied.plain(model, None, further)
    assert applied.load(model, folder).status_code == 200
    found, cached = applied.said(model, further)  # from the disk, its own
    assert found == applied.plain(model, folder, further)
    assert cached > 200
    assert applied.load(model, None).status_code == 200


def test_a_named_adapter_does_not_stack_on_it(applied: Applied) -> None:
    assert applied.load("dense", applied.root / "dense-dora").status_code == 200
    try:
        for model, more in (("dense", {"adapter": "plain"}), ("dense:plain", {})):
            refused = applied.ask(model, IDS[:9], **more)
            assert refused.status_code == 400
            assert "dense-dora, which is part of it" in refused.text
    finally:
        assert applied.load("dense", None).status_code == 200
    assert applied.ask("dense", IDS[:9], adapter="plain").status_code == 200


def test_what_was_found_out_of_the_base_is_not_its(applied: Applied) -> None:
    """The record of a probe is of the files that were probed, the adapter's too."""

    def files() -> str:
        with applied.app.pool.lease("dense") as resident:
            found: str = resident.files()
            return found

    seen = {}
    for folder in (None, applied.root / "dense-dora", applied.root / "adapters/plain"):
        assert applied.load("dense", folder).status_code == 200
        seen[folder] = files()
    assert len(set(seen.values())) == 3
    assert applied.load("dense", None).status_code == 200
    assert files() == seen[None]


def test_nothing_is_trained_on_it_that_could_not_be_served(applied: Applied) -> None:
    assert applied.load("dense", applied.root / "dense-full").status_code == 200
    body = {"model": "dense", "name": "more", "data": [{"text": "a b c"}], "iters": 1}
    url = f"{applied.app.url}/native/train"
    found = httpx.post(url, json=body, timeout=60).json()

    def state() -> dict[str, str]:
        read: dict[str, str] = httpx.get(f"{url}/{found['id']}", timeout=60).json()
        return read

    try:
        assert eventually(lambda: state()["state"] == "failed")
        assert "is read with dense-full, which is part of it" in state()["error"]
    finally:
        assert applied.load("dense", None).status_code == 200


def _other_shape(folder: Path) -> None:
    shutil.rmtree(folder)
    gpu_thread().call(
        lambda: make_adapter(
            folder, folder.parent / "models" / "hybrid", seed=1, kind="dora",
            keys=("linear_attn.out_proj",),
        )
    )  # fmt: skip


def _no_numbers(folder: Path) -> None:
    weights = str(folder / "adapters.safetensors")

    def spoil() -> None:
        arrays = dict(mx.load(weights).items())  # type: ignore[union-attr]
        mx.save_safetensors(weights, {n: a * float("nan") for n, a in arrays.items()})

    gpu_thread().call(spoil)


def _other_kind(folder: Path) -> None:
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "fine_tune_type": "prefix"}))


def _no_dropout(folder: Path) -> None:
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    del config["lora_parameters"]["dropout"]
    file.write_text(json.dumps(config))


def _too_large(folder: Path) -> None:
    weights = str(folder / "adapters.safetensors")

    def spoil() -> None:
        arrays = dict(mx.load(weights).items())  # type: ignore[union-attr]
        mx.save_safetensors(weights, {n: a * 1e25 for n, a in arrays.items()})

    gpu_thread().call(spoil)


def _full_without_numbers(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "dense-full", folder)
    _no_numbers(folder)


def _no_weights(folder: Path) -> None:
    (folder / "adapters.safetensors").unlink()


def _cut(folder: Path) -> None:
    file = folder / "adapters.safetensors"
    os.truncate(file, file.stat().st_size - 8)


def _a_pipe(folder: Path) -> None:
    _full_without_numbers(folder)
    (folder / "adapters.safetensors").unlink()
    os.mkfifo(folder / "adapters.safetensors")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_other_shape, "incompatible tensors"),
        (_no_numbers, "no numbers"),
        (_too_large, "is no number"),
        (_full_without_numbers, "no numbers"),
        (_a_pipe, "adapters.safetensors is no file"),
        (_no_weights, "No such file or directory: adapters.safetensors"),
        (_other_kind, "of the type prefix"),
        (_no_dropout, "dropout"),
    ],
)
def test_one_that_does_not_fit_ends_the_load(
    applied: Applied, tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    """With the reason, without a path of this machine; the model is let go."""
    folder = applied.root / "broken"
    shutil.copytree(applied.root / "dense-dora", folder)
    applied.set("dense", folder).raise_for_status()
    spoil(folder)
    refused = applied.reload("dense")
    shutil.rmtree(folder)
    assert refused.status_code == 500
    message = refused.json()["error"]["message"]
    assert "adapter_path of openai/dense" in message
    assert why in message
    assert str(applied.root) not in message
    assert applied.load("dense", None).status_code == 200
    assert applied.said("dense", IDS)[0] == applied.plain("dense", None, IDS)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_a_pipe, "adapters.safetensors is no file"),
        (_no_weights, "No such file or directory: adapters.safetensors"),
        (_other_kind, "of the type prefix"),
        (shutil.rmtree, "No such file or directory: adapter_config.json"),
        (_cut, "adapters.safetensors is cut off"),
    ],
)
def test_what_its_files_tell_is_refused_when_it_is_set(
    applied: Applied, spoil: Callable[[Path], None], why: str
) -> None:
    """Not by the next request, and nothing of what was sent with it is set."""
    folder = applied.root / "spoilt"
    shutil.copytree(applied.root / "dense-dora", folder)
    spoil(folder)
    body = {"adapter_path": str(folder), "ttl_seconds": 7}
    url = f"{applied.app.url}/admin/models/dense/settings"
    refused = httpx.post(url, json=body, timeout=60)
    shutil.rmtree(folder, ignore_errors=True)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "adapter_path"
    assert why in error["message"]
    assert applied.app.pool.entry("dense").ttl_s != 7
    assert applied.reload("dense").status_code == 200
