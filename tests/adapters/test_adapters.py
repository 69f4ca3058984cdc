"""Adapters of requests: what mlx-lm says with each, rows of several in one batch."""

import gc
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from sidecar.config.settings import GenerationConfig
from sidecar.core.errors import BadRequest, InsufficientMemory, Unavailable
from sidecar.core.prompt import ModelIds, ModelPrompt
from sidecar.core.requests import GenerationOptions, SamplingParams
from sidecar.engine.adapters.adapter_files import AdapterFolder, read_adapter
from sidecar.engine.adapters.banked_linear import BankedLinear
from sidecar.engine.decode_batch import DecodeBatch
from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.sampling import settle
from testkit.jobs import by_hand
from testkit.raw_http import eventually
from testkit.servers import held_gpu
from tests.adapters.conftest import BASES, Served

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]
NAMES = ("", "a", "b", "c", "d", "e")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The rows of the bank that each step of a decode batch was read with."""
    seen: list[tuple[int, ...]] = []
    forward = DecodeBatch._forward

    def noted(batch: DecodeBatch, *arguments: Any) -> mx.array:
        seen.append(tuple(batch._adapters.get(uid, 0) for uid in batch.uids))
        return forward(batch, *arguments)

    monkeypatch.setattr(DecodeBatch, "_forward", noted)
    return seen


@pytest.mark.parametrize("base", BASES)
def test_eight_rows_and_five_adapters_in_one_batch(
    served: Served, base: str, batches: list[tuple[int, ...]]
) -> None:
    """Each says what it says alone, and what mlx-lm says."""
    asked = [(name, [*PROMPT, 20 + n]) for n, name in enumerate([*NAMES, *"ab"])]
    wanted = [served.plain(base, name, ids, 60) for name, ids in asked]
    assert len({tuple(one) for one in wanted}) > 4
    for (name, ids), text in zip(asked, wanted, strict=True):
        found = served.tokens(base, name, ids, max_tokens=60)
        assert found["tokens"] == text, name
    clear(served, base)
    with ThreadPoolExecutor(8) as threads, held_gpu(served.app) as go:
        answers = [
            threads.submit(served.tokens, base, *one, max_tokens=60) for one in asked
        ]
        assert eventually(lambda: served.app.shared.admission.num_open == 8)
        go.set()
        assert [answer.result()["tokens"] for answer in answers] == wanted
    assert max(len(set(rows)) for rows in batches) == 6
    assert max(map(len, batches)) == 8


def clear(served: Served, base: str) -> None:
    url = f"{served.app.url}/admin/cache/clear?model={base}"
    httpx.post(url, timeout=60).raise_for_status()


@pytest.mark.parametrize("base", ["dense", "hybrid"])
def test_kv_of_one_adapter_serves_no_other(served: Served, base: str) -> None:
    """Nor the base, nor does the base's serve one; its own does."""
    ids = [7 * n % 997 + 5 for n in range(400)]
    clear(served, base)
    for name in NAMES:
        assert served.tokens(base, name, ids)["cached"] == 0, name
    for name in NAMES:
        again = served.tokens(base, name, ids)
        assert again["cached"] > 300, name
        assert again["tokens"] == served.plain(base, name, ids)


def play(served: Served, base: str, num_requests: int, seed: int) -> int:
    """Random requests with shared beginnings; how many reused something.

    Half of them go on from a whole earlier prompt: layers that cannot be cut
    reuse nothing else.
    """
    chance = random.Random(seed)
    talks: list[list[int]] = [[chance.randrange(5, 900) for _ in range(60)]]
    num_warm = 0
    for _ in range(num_requests):
        ids = list(chance.choice(talks))
        if chance.random() < 0.5:
            del ids[chance.randrange(40, len(ids)) :]
        ids += [chance.randrange(5, 900) for _ in range(chance.randrange(1, 40))]
        talks = [*talks, ids][-12:]
        name = chance.choice(NAMES)
        found = served.tokens(base, name, ids)
        assert found["tokens"] == served.plain(base, name, ids), (name, ids)
        num_warm += found["cached"] > 0
    return num_warm


@pytest.mark.parametrize("base", ["dense", "hybrid"])
def test_random_requests_are_answered_as_by_mlx_lm(served: Served, base: str) -> None:
    assert play(served, base, 40, 1) > (10 if base == "dense" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["dense", "hybrid"])
def test_a_thousand_random_requests(served: Served, base: str) -> None:
    assert play(served, base, 1000, 2) > (500 if base == "dense" else 50)


def test_a_conversation_goes_on_with_its_adapter(served: Served) -> None:
    """The second turn reuses the first of the same adapter alone."""
    url = f"{served.app.url}/v1/chat/completions"

    def turn(talk: list[Any], **more: Any) -> Any:
        body = {"model": "dense", "messages": talk, "temperature": 0, "max_tokens": 12}
        answer = httpx.post(url, json={**body, **more}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    talk: list[Any] = [{"role": "user", "content": "Many words to read. " * 80}]
    first = turn(talk, adapter="dense-a", session_id="s")
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    message = first["choices"][0]["message"]
    assert message != turn(talk, session_id="s")["choices"][0]["message"]
    talk += [message, {"role": "user", "content": "And then?"}]
    warm = turn(talk, adapter="dense-a", session_id="s")
    other = turn(talk, adapter="dense-b", session_id="s")
    num_first = first["usage"]["prompt_tokens"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= num_first - 1
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_session_is_forgotten_with_all_its_adapters(served: Served) -> None:
    url, talk = served.app.url, [{"role": "user", "content": "Keep this. " * 90}]
    body = {"model": "dense", "messages": talk, "max_tokens": 2, "session_id": "gone"}
    for name in ("dense-a", ""):
        sent = {**body, "adapter": name}
        httpx.post(f"{url}/v1/chat/completions", json=sent, timeout=60)
    forget = {"session": "gone"}
    gone = httpx.post(f"{url}/admin/cache/forget?model=dense", json=forget, timeout=60)
    assert gone.json()["prompts"] >= 2
    sent = {**body, "adapter": "dense-a"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=sent, timeout=60).json()
    # Others' chats begin with the same words of the template.
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] < 10


def test_a_model_and_its_adapter_are_one_name(served: Served) -> None:
    wanted = served.plain("dense", "a", PROMPT)
    for model in ("dense:dense-a", "openai/dense:dense-a", "local:dense-a"):
        answer = served.ask(model=model, prompt=PROMPT)
        assert answer.json()["choices"][0]["logprobs"]["tokens"] == wanted, model
    both = served.ask(model="dense:dense-a", adapter="dense-a", prompt=PROMPT)
    assert both.json()["choices"][0]["logprobs"]["tokens"] == wanted


def test_the_list_of_models_names_them(served: Served) -> None:
    listed = httpx.get(f"{served.app.url}/v1/models", timeout=60).json()["data"]
    ids = {one["id"] for one in listed}
    for base in BASES:
        for name in NAMES[1:]:
            own = f"{base}:{base}-{name}"
            assert own in ids or f"openai/{own}" in ids
    assert not any("dense:hybrid-a" in one for one in ids)


@pytest.mark.parametrize("path", ["completions", "chat/completions", "messages"])
def test_an_adapter_that_is_not_there_is_a_404(served: Served, path: str) -> None:
    prompt: Any = [{"role": "user", "content": "x"}]
    body: dict[str, Any] = {"max_tokens": 2, "messages": prompt, "prompt": "x"}
    for fields in ({"adapter": "nobody"}, {"model": "dense:nobody"}):
        answer = httpx.post(f"{served.app.url}/v1/{path}", json={**body, **fields})
        assert answer.status_code == 404, answer.text
        assert "nobody" in answer.text


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"adapter": 5}, 400),
        ({"adapter": "../dense-a"}, 404),
        ({"adapter": "dense-a", "model": "dense:dense-b"}, 400),
        ({"adapters": ["dense-a"]}, 400),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_refused(
    served: Served, fields: dict[str, Any], status: int
) -> None:
    assert served.ask(prompt=PROMPT, **fields).status_code == status


def broken(kind: str) -> Callable[[Path], None]:
    """What makes an adapter one that cannot be served."""

    def change_config(folder: Path, **changes: Any) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    def rename(folder: Path, old: str, new: str) -> None:
        file = str(folder / "adapters.safetensors")
        arrays: Any = mx.load(file)
        mx.eval(arrays)
        renamed = {name.replace(old, new): array for name, array in arrays.items()}
        mx.save_safetensors(file, renamed)

    def narrow(folder: Path) -> None:
        file = str(folder / "adapters.safetensors")
        arrays: Any = mx.load(file)
        mx.save_safetensors(file, {k: v[:-1] + 0 for k, v in arrays.items()})

    def scaled(folder: Path, factor: float) -> None:
        file = str(folder / "adapters.safetensors")
        arrays: Any = mx.load(file)
        mx.save_safetensors(file, {k: v * factor for k, v in arrays.items()})

    def piped(folder: Path) -> None:
        (folder / "adapters.safetensors").unlink()
        os.mkfifo(folder / "adapters.safetensors")

    acts: dict[str, Callable[[Path], None]] = {
        "dora": lambda f: change_config(f, fine_tune_type="dora"),
        "no rank": lambda f: change_config(f, lora_parameters={}),
        "no object": lambda f: (f / "adapter_config.json").write_text("[]") and None,
        "no JSON": lambda f: (f / "adapter_config.json").write_text("{") and None,
        "no weights": lambda f: (f / "adapters.safetensors").unlink(),
        "huge scale": lambda f: change_config(
            f, lora_parameters={"rank": 4, "scale": 10**400}
        ),
        "no number": lambda f: change_config(
            f, lora_parameters={"rank": 4, "scale": float("nan")}
        ),
        "other rank": lambda f: change_config(
            f, lora_parameters={"rank": 9, "scale": 20.0}
        ),
        "overflowing": lambda f: scaled(f, 1e38),
        "pipe": piped,
        "cut": lambda f: (f / "adapters.safetensors").write_bytes(b"\0" * 40) and None,
        "other layer": lambda f: rename(f, "layers.0", "layers.77"),
        "no projection": lambda f: rename(f, "self_attn.q_proj", "input_layernorm"),
        "half": lambda f: rename(f, "q_proj.lora_a", "q_proj.lora_m"),
        "other width": narrow,
    }
    return acts[kind]


@pytest.mark.parametrize(
    "kind",
    ["dora", "no rank", "no object", "no JSON", "no weights", "cut", "other layer",
     "no projection", "half", "other width", "huge scale", "no number", "overflowing",
     "other rank",
     "pipe"],
)  # fmt: skip
def test_one_that_cannot_be_served_says_why_and_harms_nobody(
    served: Served, kind: str
) -> None:
    name = f"broken-{kind.replace(' ', '-')}"
    folder = served.adapters / name
    shutil.copytree(served.adapters / "dense-a", folder)
    try:
        gpu_thread().call(lambda: broken(kind)(folder))
        answer = served.ask(model="dense", adapter=name, prompt=PROMPT)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "adapter"
        assert str(served.root) not in answer.text
        assert httpx.get(f"{served.app.url}/v1/models", timeout=60).status_code == 200
    finally:
        shutil.rmtree(folder)
    for adapter in ("", "a"):
        found = served.tokens("dense", adapter, PROMPT)["tokens"]
        assert found == served.plain("dense", adapter, PROMPT)


def test_one_that_is_trained_anew_is_another(served: Served) -> None:
    """Under the same name: its KV and its row are not those of the first."""
    folder = served.adapters / "changing"
    ids = [3 * n % 700 + 9 for n in range(300)]
    for name in ("a", "b"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(served.adapters / f"dense-{name}", folder)
        answer = served.ask(model="dense", adapter="changing", prompt=ids).json()
        assert answer["choices"][0]["logprobs"]["tokens"] == served.plain(
            "dense", name, ids
        )
    shutil.rmtree(folder)


def test_one_that_looks_as_old_as_the_former_is_another(served: Served) -> None:
    """A copy keeps size and time of what it is of."""
    folder, stamp = served.adapters / "copied", (10**9, 10**9)
    shutil.copytree(served.adapters / "dense-a", folder)
    weights = folder / "adapters.safetensors"
    for name in ("a", "b8", "a"):
        source = served.adapters / "dense-a" / "adapters.safetensors"
        data = bytearray(source.read_bytes())
        if name == "b8":
            data[-4:] = b"\0\0\x80?"
        weights.write_bytes(data)
        os.utime(weights, stamp)
        digest = AdapterFolder(served.adapters).find("copied").digest
        own = AdapterFolder(served.adapters).find("dense-a").digest
        assert (digest == own) == (name == "a")
    shutil.rmtree(folder)


def test_weights_that_change_while_they_are_loaded_are_not_served(
    served: Served,
) -> None:
    """Their KV would be kept under the name of others."""
    folder = served.adapters / "swapped"
    shutil.copytree(served.adapters / "dense-a", folder)
    files = AdapterFolder(served.adapters).find("swapped")
    (folder / "adapter_config.json").write_bytes(
        (served.adapters / "dense-b" / "adapter_config.json").read_bytes()
    )
    (folder / "adapters.safetensors").write_bytes(
        (served.adapters / "dense-b" / "adapters.safetensors").read_bytes()
    )
    with served.app.pool.lease("dense") as resident:
        adapters = resident.engine.adapters
        adapters.let_go_idle()
        with pytest.raises(Unavailable, match="ask again"), adapters.leased(files):
            pass
        assert adapters.num_loaded == 0
    shutil.rmtree(folder)


def test_a_bank_without_users_is_given_up(served: Served) -> None:
    """The layers are then as they were read."""
    with served.app.pool.lease("dense") as resident:
        engine = resident.engine
        served.tokens("dense", "a", PROMPT)
        assert engine.adapters.num_loaded > 0

        def banked() -> int:
            modules = engine.model.model.modules()
            return sum(isinstance(module, BankedLinear) for module in modules)

        assert served.app.gpu.call(banked) > 0
        engine.adapters.let_go_idle()
        assert engine.adapters.num_loaded == 0
        assert served.app.gpu.call(banked) == 0
    assert served.tokens("dense", "", PROMPT)["tokens"] == served.plain(
        "dense", "", PROMPT
    )


def test_one_in_use_stays_in_the_bank(served: Served) -> None:
    """As long as a request has it, and until what was cancelled has left the batch."""
    files = AdapterFolder(served.adapters).find("dense-a")
    with served.app.pool.lease("dense") as resident:
        engine, adapters = resident.engine, resident.engine.adapters
        adapters.let_go_idle()
        with by_hand(served.app, engine) as make:
            with adapters.leased(files) as row:
                assert adapters.let_go_idle() == 0
                prompt = ModelPrompt(ModelIds(tuple(PROMPT)), adapter=row)
                options = GenerationOptions(max_tokens=9)
                settled = settle(SamplingParams(), GenerationConfig(), None)
                job = engine.submit(prompt, settled, options)
                make(3)
            engine.release(job)
            assert adapters.let_go_idle() == 0
            assert adapters.num_loaded == 1
            make(1)
            assert adapters.let_go_idle() == 1


@pytest.fixture
def own_adapter(served: Served) -> Iterator[Callable[[str | None], httpx.Response]]:
    """Sets the adapter of a model's own and loads it anew; taken back at the end."""
    url = f"{served.app.url}/admin/models/four-bit"

    def set_it(path: str | None) -> httpx.Response:
        body = {"adapter_path": path}
        httpx.post(f"{url}/settings", json=body, timeout=60).raise_for_status()
        httpx.post(f"{url}/unload?force=true", json={}, timeout=60)
        return httpx.post(f"{url}/load", json={}, timeout=60)

    yield set_it
    set_it(None).raise_for_status()


def test_a_model_has_an_adapter_of_its_own(
    served: Served, own_adapter: Callable[[str | None], httpx.Response]
) -> None:
    """Where a request names none; its KV is not the base's."""
    base, ids = "four-bit", [7 * n % 997 + 5 for n in range(300)]
    plain = served.plain(base, "", ids)
    assert served.tokens(base, "", ids)["tokens"] == plain
    folder = served.adapters / f"{base}-a"
    assert own_adapter(str(folder)).status_code == 200
    first = served.tokens(base, "", ids)
    assert first == {"tokens": served.plain(base, "a", ids), "cached": 0}
    assert first["tokens"] != plain
    assert served.tokens(base, "a", ids)["cached"] > 200
    assert served.tokens(base, "b", ids)["tokens"] == served.plain(base, "b", ids)
    assert own_adapter(None).status_code == 200
    assert served.tokens(base, "", ids)["tokens"] == plain


def test_an_own_adapter_that_is_gone_ends_the_load(
    served: Served, own_adapter: Callable[[str | None], httpx.Response], tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    shutil.copytree(served.adapters / "four-bit-a", folder)
    assert own_adapter(str(folder)).status_code == 200
    shutil.rmtree(folder)
    url = f"{served.app.url}/admin/models/four-bit"
    httpx.post(f"{url}/unload?force=true", json={}, timeout=60).raise_for_status()
    refused = httpx.post(f"{url}/load", json={}, timeout=60)
    assert refused.status_code == 500
    message = refused.json()["error"]["message"]
    assert "adapter_path of four-bit" in message
    assert "adapter_config.json" in message or "adapters.safetensors" in message
    assert str(tmp_path.parent) not in message


def test_an_own_adapter_is_tried_at_the_load(
    served: Served, own_adapter: Callable[[str | None], httpx.Response]
) -> None:
    """One of another shape of model is no fault of the requests that come then."""
    refused = own_adapter(str(served.adapters / "hybrid-a"))
    assert refused.status_code == 500
    assert "does not fit" in refused.json()["error"]["message"]


def test_an_own_adapter_that_breaks_later_is_the_servers_fault(
    served: Served,
    own_adapter: Callable[[str | None], httpx.Response],
    tmp_path: Path,
) -> None:
    """Not its client's, who has named none; those that name another go on."""
    folder = tmp_path / "own"
    shutil.copytree(served.adapters / "four-bit-a", folder)
    assert own_adapter(str(folder)).status_code == 200
    (folder / "adapter_config.json").write_text("{")
    refused = served.ask(model="four-bit", prompt=PROMPT)
    assert refused.status_code == 503
    assert "adapter_path of four-bit" in refused.json()["error"]["message"]
    assert served.ask(model="four-bit", prompt=PROMPT, adapter="four-bit-b").is_success


def test_an_adapter_whose_config_is_a_pipe_is_no_adapter(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "adapter_config.json")
    with pytest.raises(ValueError, match="is no file"):
        read_adapter(tmp_path)


def kept_by(refused: Callable[[], int], times: int) -> int:
    """Bytes that further refusals keep, while no garbage is collected."""
    refused()
    gc.disable()
    try:
        before = refused()
        for _ in range(times):
            after = refused()
    finally:
        gc.enable()
    return after - before


def test_a_refused_adapter_leaves_no_memory(served: Served) -> None:
    """Not until a garbage collection either."""
    bad = served.adapters / "dense-nan"
    shutil.copytree(served.adapters / "dense-a", bad)
    weights = str(bad / "adapters.safetensors")

    def spoil() -> None:
        arrays: Any = mx.load(weights)
        spoiled = {name: array * float("nan") for name, array in arrays.items()}
        mx.save_safetensors(weights, spoiled)

    served.app.gpu.call(spoil)
    files = AdapterFolder(served.adapters).find("dense-nan")
    with served.app.pool.lease("dense") as resident:
        leases = resident.engine.adapters

        def refused() -> int:
            try:  # pytest.raises would keep what the error's frames hold
                with leases.leased(files):
                    pytest.fail("it is served")
            except BadRequest as error:
                assert "no numbers" in error.message  # noqa: PT017
            return int(served.app.gpu.call(mx.get_active_memory))

        kept = kept_by(refused, times=4)
    shutil.rmtree(bad)
    assert kept < files.num_bytes


def test_idle_adapters_give_way(served: Served) -> None:
    """To a prompt that needs their room, and to another adapter."""
    with served.app.pool.lease("dense") as resident:
        engine, process = resident.engine, served.app.shared.process
        served.tokens("dense", "a", PROMPT)
        assert engine.adapters.num_loaded
        limit = process.limit_bytes
        served.app.gpu.call(process.sample)
        length = 100
        bank = engine.model.adapters.num_bytes
        needed = engine.guard.model.demand(length + 1).total - bank // 2
        process.limit_bytes += needed - process.free_bytes
        try:
            ids = [9 * n % 997 + 5 for n in range(length)]
            assert served.ask(model="dense", prompt=ids, max_tokens=1).is_success
        finally:
            process.limit_bytes = limit
        assert engine.adapters.num_loaded == 0


def test_refused_over_http_an_adapter_leaves_no_memory(served: Served) -> None:
    """Not until a garbage collection either: a connection forgets its error."""
    bad = served.adapters / "dense-spoiled"
    shutil.copytree(served.adapters / "dense-a", bad)
    weights = str(bad / "adapters.safetensors")

    def spoil() -> None:
        arrays: Any = mx.load(weights)
        more = {"model.x.lora_a": mx.ones((4000, 4)), "model.x.lora_b": mx.ones((4, 9))}
        mx.save_safetensors(weights, {**arrays, **more})

    served.app.gpu.call(spoil)
    size = (bad / "adapters.safetensors").stat().st_size

    def refused() -> int:
        asked = served.ask(model="dense", prompt=PROMPT, adapter="dense-spoiled")
        assert asked.status_code == 400
        return int(served.app.gpu.call(mx.get_active_memory))

    kept = kept_by(refused, times=6)
    shutil.rmtree(bad)
    assert kept < size


@pytest.fixture
def short(served: Served) -> Iterator[Callable[[int], None]]:
    """Leaves so many bytes free, an idle adapter of `dense` not among them."""
    process = served.app.shared.process
    limit = process.limit_bytes
    with served.app.pool.lease("dense") as resident:
        served.app.gpu.call(resident.engine.adapters.let_go_idle)
    served.tokens("dense", "a", PROMPT)

    def leave(num_bytes: int) -> None:
        served.app.gpu.call(process.sample)
        process.limit_bytes += num_bytes - process.free_bytes

    yield leave
    process.limit_bytes = limit


def test_idle_adapters_give_way_to_those_of_another_model(
    served: Served, short: Callable[[int], None]
) -> None:
    with (
        served.app.pool.lease("dense") as dense,
        served.app.pool.lease("hybrid") as hybrid,
    ):
        served.app.gpu.call(hybrid.engine.adapters.let_go_idle)
        files = AdapterFolder(served.adapters).find("hybrid-a")
        short(files.num_bytes - 1)  # it is not even read
        with pytest.raises(InsufficientMemory), hybrid.engine.adapters.leased(files):
            pass
        assert dense.engine.adapters.num_loaded == 0


def test_idle_adapters_give_way_to_what_is_about_to_be_allocated(
    served: Served, short: Callable[[int], None]
) -> None:
    with served.app.pool.lease("dense") as dense:
        short(0)
        served.app.gpu.call(lambda: served.app.shared.process.relieve(1))
        assert dense.engine.adapters.num_loaded == 0


def test_what_was_picked_out_goes_with_its_last_user(served: Served) -> None:
    served.tokens("dense", "a", PROMPT)
    with served.app.pool.lease("dense") as resident:
        shared = resident.engine.model.adapters._shared

        def is_gone() -> bool:
            return not any(one._kept for one in shared.values())

        assert shared
        assert eventually(lambda: served.app.gpu.call(is_gone))


def test_idle_adapters_are_let_go_without_waiting_for_who_loads_one(
    served: Served,
) -> None:
    """He waits for the GPU thread himself."""
    served.tokens("dense", "a", PROMPT)
    with served.app.pool.lease("dense") as resident:
        adapters = resident.engine.adapters
        with adapters._lock:
            began = time.monotonic()
            assert served.app.gpu.call(adapters.let_go_idle) == 0
            assert time.monotonic() - began < 2
        assert adapters.let_go_idle() == 1


def test_adapters_are_read_while_freed_memory_is_given_back(served: Served) -> None:
    """A file object is read on a thread that needs the interpreter: all stood still."""
    data = (served.adapters / "dense-a" / "adapters.safetensors").read_bytes()
    code = (
        "import sys, threading; from sidecar.engine.gpu_thread import gpu_thread, "
        "load_thread; from sidecar.engine.adapters.adapter_bank import read_pairs; "
        "import mlx.core as mx; data = sys.stdin.buffer.read()\n"
        "def clear():\n    while True: gpu_thread().call(mx.clear_cache)\n"
        "threading.Thread(target=clear, daemon=True).start()\n"
        "for _ in range(300): load_thread().call(lambda: read_pairs(data))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=data, timeout=120, check=False
    )
    assert done.returncode == 0
