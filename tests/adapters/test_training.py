"""Adapters that are trained here: served at once, and by mlx-lm as well."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import mlx.optimizers as optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load as load_by_mlx_lm

from sidecar.cli.train import sparkline
from sidecar.core.native import LoraJob
from sidecar.engine.decode_batch import DecodeBatch
from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.native.lora_training import LoraTraining, twin
from testkit.raw_http import eventually
from testkit.servers import running_sidecar
from tests.adapters.conftest import Served

REPO = Path(__file__).parents[2]
WORDS = ["cat", "dog", "bird", "fish"]
ROWS = [{"text": f"{word} {word} blue {word} blue stone"} for word in WORDS]
QUICK: dict[str, Any] = {
    "data": ROWS, "iters": 60, "learning_rate": 1e-2, "alpha": 32, "num_layers": -1,
    "keys": ["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"],
}  # fmt: skip


def begin(served: Served, **fields: Any) -> Any:
    url = f"{served.app.url}/native/train"
    answer = httpx.post(url, json={**QUICK, "model": "dense", **fields}, timeout=60)
    assert answer.status_code == 202, answer.text
    return answer.json()


def state_of(served: Served, found: Any) -> Any:
    return httpx.get(f"{served.app.url}/native/train/{found['id']}", timeout=60).json()


def ended(served: Served, found: Any) -> Any:
    assert eventually(
        lambda: state_of(served, found)["state"] not in ("waiting", "running")
    )
    return state_of(served, found)


@pytest.mark.parametrize("base", ["dense", "four-bit", "hybrid"])
def test_what_is_trained_is_served_and_read_by_mlx_lm(
    served: Served, base: str
) -> None:
    """While another adapter of the same layers is in the bank."""
    served.tokens(base, "a", [5, 6, 7])
    name = f"{base}-trained"
    found = ended(served, begin(served, name=name, model=base))
    assert (found["state"], found["error"]) == ("done", None)
    losses = [loss for _, loss in found["losses"]]
    assert [step for step, _ in found["losses"]] == list(range(1, 61))
    assert losses[-1] < 0.6 * losses[0]
    assert found["tokens_per_s"] > 0
    with served.app.pool.lease(base) as resident:
        ids = resident.engine.model.tokenizer.encode("fish fish blue")
    told = served.tokens(base, "trained", ids)["tokens"]
    assert told == served.plain(base, "trained", ids)
    assert told != served.tokens(base, "", ids)["tokens"]
    weights = mx.load(str(served.adapters / name / "adapters.safetensors"))
    assert {key.rpartition(".")[2] for key in weights} == {"lora_a", "lora_b"}
    assert sorted(file.name for file in (served.adapters / name).iterdir()) == [
        "adapter_config.json", "adapters.safetensors",
    ]  # fmt: skip


def test_the_built_in_model_learns_a_task(tmp_path: Path) -> None:
    """At rank 8, on the CPU, in three minutes: its loss is halved, and it does it."""
    answer = "The stone is blue."
    rows = [{"prompt": f"What is the {word}?", "completion": answer} for word in WORDS]
    body = {
        "name": "stone", "data": rows, "iters": 100, "learning_rate": 2e-3, "alpha": 16,
        "mask_prompt": True, "num_layers": -1, "rank": 8, "keys": QUICK["keys"],
    }  # fmt: skip
    with running_sidecar({"ADAPTER_DIR": str(tmp_path)}) as app:
        url = f"{app.url}/native/train"
        found = httpx.post(url, json=body, timeout=60).json()
        training = app.core.services.training.find(found["id"])
        assert training.ended.wait(600)
        done = training.as_json()
        assert (done["state"], done["error"]) == ("done", None)
        assert done["losses"][-1][1] < done["losses"][0][1] / 2
        talk = [{"role": "user", "content": f"What is the {WORDS[1]}?"}]
        asked = {"messages": talk, "temperature": 0, "enable_thinking": False,
                 "max_tokens": 20, "adapter": "stone"}  # fmt: skip
        url = f"{app.url}/v1/chat/completions"
        said = httpx.post(url, json=asked, timeout=60).json()["choices"][0]["message"]
        assert said["content"] == answer


def test_the_base_is_what_it_was(served: Served) -> None:
    ids = [9, 10, 11]
    before = served.tokens("dense", "", ids)["tokens"]
    ended(served, begin(served, name="unseen", iters=5))
    assert served.tokens("dense", "", ids)["tokens"] == before


@pytest.mark.parametrize("init", ["kaiming_normal", "uniform"])
def test_it_begins_by_saying_what_the_base_says(served: Served, init: str) -> None:
    with served.app.pool.lease("dense") as resident:
        model = resident.engine.model

    def apart() -> float:
        network = LoraTraining(model, LoraJob(init=init))._begin()
        ids = mx.array([[5, 6, 7, 8]])
        return mx.abs(network(ids) - model.model(ids)).max().item()

    assert served.app.gpu.call(apart) == 0.0


def test_a_twin_shares_the_weights(served: Served) -> None:
    with served.app.pool.lease("hybrid") as resident:
        model = resident.engine.model

    def shared() -> bool:
        own = dict(tree_flatten(model.model.parameters()))
        copied = dict(tree_flatten(twin(model.model).parameters()))
        plain = {n: a for n, a in own.items() if "lora" not in n}
        plain = {n.replace(".linear.", "."): a for n, a in plain.items()}
        return all(copied[name] is array for name, array in plain.items())

    served.tokens("hybrid", "a", [5, 6, 7])
    assert served.app.gpu.call(shared)


def test_recomputed_activations_give_the_same_losses(served: Served) -> None:
    plain = ended(served, begin(served, name="plain", iters=6))
    again = ended(served, begin(served, name="again", iters=6, grad_checkpoint=True))
    assert again["losses"] == plain["losses"]
    with served.app.pool.lease("dense") as resident:
        layer = resident.engine.model.model.layers[0]
    assert type(layer).__name__ != "Checkpointed"


def test_a_batch_in_parts_is_the_same_batch(served: Served) -> None:
    """Each part is a turn: a request does not wait for all rows of a batch."""
    with served.app.pool.lease("dense") as resident:
        model = resident.engine.model
    rows = [([5 + n, 6, 7, 8, 9][: 3 + n % 3], n % 2) for n in range(8)]

    def train(turn_tokens: int) -> tuple[list[float], int, Any]:
        job, losses = LoraJob(iters=4, batch_size=8, learning_rate=1e-2), []
        training = LoraTraining(model, job, turn_tokens)
        steps = training.steps(
            rows, lambda step: losses.append(step.loss), lambda: None
        )
        num_turns = 0
        while True:
            try:
                next(steps)
                num_turns += 1
            except StopIteration as end:
                return losses, num_turns, end.value

    whole, few, wanted = served.app.gpu.call(lambda: train(4096))
    parted, many, found = served.app.gpu.call(lambda: train(64))
    assert (few, many) == (1 + 4 * 2, 1 + 4 * 9)
    assert parted == pytest.approx(whole, abs=1e-4)
    for name, array in wanted.items():
        assert np.abs(np.array(array) - np.array(found[name])).max() < 1e-3, name


def test_the_optimiser_is_corrected_for_its_bias() -> None:
    weights = {"w": mx.array([1.0])}
    optimizer = optimizers.AdamW(0.1, weight_decay=0.1, bias_correction=True)
    found = optimizer.apply_gradients({"w": mx.array([0.5])}, weights)
    wanted = 1 * (1 - 0.1 * 0.1) - 0.1 * 0.5 / (0.5 + 1e-8)
    assert found["w"].item() == pytest.approx(wanted, abs=1e-6)


def test_a_cancelled_training_leaves_nothing(served: Served) -> None:
    before = sorted(served.adapters.iterdir())
    found = begin(served, name="broken-off", iters=1_000_000)
    assert eventually(lambda: state_of(served, found)["step"] > 3)
    busy = httpx.post(
        f"{served.app.url}/native/train", json={**QUICK, "name": "two"}, timeout=60
    )
    assert busy.status_code == 429
    url = f"{served.app.url}/native/train/{found['id']}"
    httpx.delete(url, timeout=60).raise_for_status()
    assert ended(served, found)["state"] == "cancelled"
    assert sorted(served.adapters.iterdir()) == before
    assert served.app.shared.admission.num_open == 0


def test_a_request_waits_for_a_step_of_it_at_most(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first and the last step of a stream none of it is done."""
    found = begin(served, name="beside", iters=1_000_000)
    training = served.app.core.services.training.find(found["id"])
    seen: list[int] = []
    forward = DecodeBatch._forward

    def noted(batch: DecodeBatch, *arguments: Any) -> mx.array:
        seen.append(training.losses[-1][0])
        return forward(batch, *arguments)

    try:
        assert eventually(lambda: len(training.losses) > 3)
        monkeypatch.setattr(DecodeBatch, "_forward", noted)
        answer = served.ask(model="dense", prompt=[5, 6, 7], max_tokens=100)
        assert answer.status_code == 200
        assert len(seen) > 5
        assert len(set(seen)) == 1
        assert eventually(lambda: training.losses[-1][0] > seen[-1] + 3)
    finally:
        httpx.delete(f"{served.app.url}/native/train/{found['id']}", timeout=60)
        ended(served, found)


def test_an_exclusive_training_has_the_server_for_itself(served: Served) -> None:
    """Requests are refused with the time that it takes, until it has ended."""
    found = begin(served, name="alone", iters=1_000_000, exclusive=True)
    url = f"{served.app.url}/native/train/{found['id']}"
    ask = {"model": "dense", "prompt": [5, 6, 7], "max_tokens": 4}
    try:
        assert eventually(lambda: state_of(served, found)["step"] > 3)
        refused = served.ask(**ask)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "training"
        assert "alone" in refused.json()["error"]["message"]
        assert served.app.shared.admission.is_paused  # batches wait as for a person
        ready = httpx.get(f"{served.app.url}/ready", timeout=60)
        assert (ready.status_code, ready.json()["status"]) == (503, "training")
        batch = {"model": "dense", "prompts": ["a", "b"], "max_tokens": 2}
        many = f"{served.app.url}/native/batch_generate"
        assert httpx.post(many, json=batch, timeout=60).status_code == 503
        left_s = state_of(served, found)["seconds_left"]
        assert 0.2 * left_s < int(refused.headers["retry-after"]) < 5 * left_s
    finally:
        httpx.delete(url, timeout=60).raise_for_status()
        ended(served, found)
    assert not served.app.shared.admission.is_paused
    assert served.ask(**ask).status_code == 200


def test_an_exclusive_training_is_cancelled_while_it_waits(served: Served) -> None:
    """For a stream that does not end: it need not have its turn to learn of it."""
    with served.app.pool.lease("dense") as resident:
        never = {str(i): -100 for i in resident.engine.model.stop_ids}
    ask = {"model": "dense", "prompt": [5, 6, 7], "max_tokens": 30_000, "stream": True,
           "logit_bias": never, "temperature": 1.5, "seed": 3}  # fmt: skip
    url = f"{served.app.url}/v1/completions"
    with httpx.stream("POST", url, json=ask, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        found = begin(served, name="waits", iters=1_000_000, exclusive=True)
        admission = served.app.shared.admission
        assert eventually(lambda: admission.is_paused)
        httpx.delete(
            f"{served.app.url}/native/train/{found['id']}", timeout=60
        ).raise_for_status()
        assert eventually(lambda: not admission.is_paused, 5)
        assert served.app.shared.admission.num_open == 1, [*lines][-5:]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"name": "../out"}, "name"),
        ({"name": "dense-a"}, "name"),
        ({"name": ""}, "name"),
        ({"data": []}, "data"),
        ({"data": [5]}, "data[0]"),
        ({"data": [{"text": "a", "prompt": "b", "completion": "c"}]}, "data[0]"),
        ({"rank": 0}, "rank"),
        ({"iters": 0}, "iters"),
        ({"num_layers": 0}, "num_layers"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"init": "zeros"}, "init"),
        ({"dtype": "int8"}, "dtype"),
        ({"keys": [5]}, "keys"),
        ({"exclusive": 1}, "exclusive"),
        ({"exclusively": True}, "exclusively"),
        ({"model": "nobody"}, "model"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused(
    served: Served, more: dict[str, Any], param: str
) -> None:
    body = {**QUICK, "name": "refused", **more}
    answer = httpx.post(f"{served.app.url}/native/train", json=body, timeout=60)
    assert (answer.status_code // 100, answer.json()["error"]["param"]) == (4, param)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"data": ROWS[:1]}, "batch_size"),
        ({"data": [{"other": "x"}] * 4}, "data must have"),
        ({"data": [{"text": "x"}] * 3 + [{"other": 5}]}, "data[3]"),
        ({"data": ROWS, "mask_prompt": True}, "mask_prompt"),
        ({"keys": ["nothing.here"]}, "keys"),
        ({"keys": ["self_attn.q_proj", "embed_tokens"]}, "'embed_tokens' is none"),
        ({"data": [{"text": ""}] * 4}, "data[0].text"),
        ({"data": [{"text": ["a", "b"]}] * 4}, "data[0].text"),
        (
            {
                "data": [{"prompt": "a " * 99, "completion": "b"}] * 4,
                "mask_prompt": True,
                "max_seq_length": 20,
            },
            "no answer within max_seq_length",
        ),
    ],
    ids=str,
)
def test_what_fails_says_why_and_leaves_nothing(
    served: Served, more: dict[str, Any], words: str
) -> None:
    found = ended(served, begin(served, name="failed", **more))
    assert found["state"] == "failed"
    assert words.lower() in found["error"].lower()
    assert not (served.adapters / "failed").exists()
    assert served.app.shared.admission.num_open == 0


def test_without_a_folder_nothing_is_trained() -> None:
    with running_sidecar(ready=False) as app:
        body = {**QUICK, "name": "x"}
        answer = httpx.post(f"{app.url}/native/train", json=body, timeout=60)
        assert answer.json()["error"]["param"] == "name"
        assert "ADAPTER_DIR" in answer.text


def run(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "sidecar", *map(str, arguments)], cwd=REPO,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_on_the_command_line(served: Served, tmp_path: Path) -> None:
    """Trained, drawn, fused: the fused model says what the base with it says."""
    rows, out = tmp_path / "rows.jsonl", tmp_path / "adapters" / "mine"
    rows.write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    base = served.root / "models" / "dense"
    done = run(
        "train", rows, out, "--model", base, "--iters", "30", "--learning-rate", "0.01",
        "--alpha", "16", "--num-layers", "-1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "30/30" in done.stdout
    assert "█" in done.stdout
    assert (out / "loss.png").stat().st_size > 1000
    fused = tmp_path / "fused"
    done = run("fuse", "--model", base, "--adapter-path", out, "--save-path", fused)
    assert done.returncode == 0, done.stderr

    def logits(folder: Path, adapter: Path | None) -> np.ndarray:
        loaded: Any = load_by_mlx_lm(
            str(folder), adapter_path=str(adapter) if adapter else None
        )
        return np.array(loaded[0](mx.array([[5, 6, 7]])))

    apart = gpu_thread().call(lambda: logits(fused, None) - logits(base, out))
    assert np.abs(apart).max() < 1e-3
    # A config that leaves out what the weights show is served, so it is fused, too.
    bare, again = tmp_path / "bare", tmp_path / "again"
    shutil.copytree(base, bare)
    config = json.loads((bare / "config.json").read_text())
    config |= {"model_type": None}
    del config["head_dim"]
    (bare / "config.json").write_text(json.dumps(config))
    done = run("fuse", f"--model={bare}", "--adapter-path", out, "--save-path", again)
    assert done.returncode == 0, done.stderr
    apart = gpu_thread().call(lambda: logits(again, None) - logits(fused, None))
    assert np.abs(apart).max() == 0


def test_bad_rows_are_named_by_their_line(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    for text, words in (('{"text": "a"}\n{', "line 2 is no JSON"), ("[]", "line 1")):
        rows.write_text(text)
        done = run("train", rows, tmp_path / "out")
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def test_losses_as_bars() -> None:
    assert sparkline([8.0, 1.0]) == "█▁"
    assert sparkline([1.0]) == "▁"
    assert len(sparkline([1.0 / n for n in range(1, 1000)])) == 60
