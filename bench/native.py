"""
What a batch of labels gains over single requests, and what adapters cost a batch.

    python -m bench native [--model FOLDER] [--rounds 3] [--texts 1000]

Texts are classified in one request and one by one. Eight streams decode with the base,
then with five adapters of rank 8 and the base mixed, in turns: their rates, and the
share of the base's that is left.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save_file

from bench.clients import ask_all
from bench.options import positive, several
from bench.prompts import random_ids
from bench.servers import Setup, make_if_absent, sidecar

_RANK, _NUM_ADAPTERS, _NUM_STREAMS = 8, 5, 8
_LABELS = [" cats", " dogs"]


def main(argv: list[str]) -> int:
    """Exit code 0; the figures go to standard output."""
    parser = argparse.ArgumentParser(prog="python -m bench native", description=__doc__)
    parser.add_argument("--model", type=Path, help="else a random one of 52 M")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--texts", type=positive, default=1000)
    parser.add_argument("--max-tokens", type=several, default=400)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        model = (options.model or Path(scratch) / "model").resolve()
        adapters = Path(scratch) / "adapters"
        settings = {"SPECULATION": "off", "ADAPTER_DIR": str(adapters)}
        tree = Path(__file__).parents[1]
        setup = Setup(model, None, tree, Path(scratch), settings=settings)
        make_if_absent(setup)
        for number in range(_NUM_ADAPTERS):
            _write_adapter(adapters / f"a{number}", model, number)
        with sidecar(setup) as port:
            _classify(port, options.texts)
            _decode(port, options.rounds, options.max_tokens)
    return 0


def _classify(port: int, count: int) -> None:
    texts = [f"Text {n}: is it about cats or about dogs?" for n in range(count)]
    url = f"http://127.0.0.1:{port}/native/classify"
    with httpx.Client(timeout=600) as client:

        def seconds(prompts: list[str]) -> float:
            started = time.perf_counter()
            body = {"prompts": prompts, "labels": _LABELS}
            client.post(url, json=body).raise_for_status()
            return time.perf_counter() - started

        seconds(texts[:8])
        together = count / seconds(texts)
        singles = texts[: min(count, 100)]
        alone = len(singles) / sum(seconds([text]) for text in singles)
    sys.stdout.write(
        f"classify: {together:.1f} texts/s together, {alone:.1f} one by one, "
        f"{together / alone:.2f} times\n"
    )


def _decode(port: int, rounds: int, max_tokens: int) -> None:
    names = [f"a{n}" for n in range(_NUM_ADAPTERS)]
    mixed = [*names, "", "", ""]
    found: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        pair = (
            _rate(port, [""] * _NUM_STREAMS, max_tokens),
            _rate(port, mixed, max_tokens),
        )
        if number:  # the first one loads and compiles
            found.append(pair)
    base, adapted = (statistics.median(rates) for rates in zip(*found, strict=True))
    share = statistics.median(after / before for before, after in found)
    sys.stdout.write(
        f"{_NUM_STREAMS} streams: {base:.1f} steps/s with the base, {adapted:.1f} with "
        f"{_NUM_ADAPTERS} adapters and the base, {share:.3f} of it\n"
    )


def _rate(port: int, adapters: list[str], max_tokens: int) -> float:
    """Steps a second while all streams decode."""
    bodies: list[dict[str, Any]] = [
        {"prompt": random_ids(200), "adapter": name} for name in adapters
    ]
    answers = ask_all(port, "/v1/completions", bodies, max_tokens)
    begun = max(answer.first for answer in answers)
    ended = min(answer.last for answer in answers)
    if ended <= begun:
        raise ValueError("the streams do not decode together: --max-tokens is too low")
    steps = [sum(begun <= at <= ended for at in answer.times) for answer in answers]
    return statistics.median(steps) / (ended - begun)


def _write_adapter(folder: Path, model: Path, seed: int) -> None:
    """A random one of the query and value projections of all layers."""
    config = json.loads((model / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    widths = {"q_proj": config["num_attention_heads"] * head,
              "v_proj": config["num_key_value_heads"] * head}  # fmt: skip
    chance, arrays = np.random.default_rng(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            path = f"model.layers.{layer}.self_attn.{name}"
            for kind, shape in (("a", (hidden, _RANK)), ("b", (_RANK, width))):
                matrix = chance.normal(size=shape).astype(np.float32) * 0.02
                arrays[f"{path}.lora_{kind}"] = matrix
    folder.mkdir(parents=True)
    save_file(arrays, str(folder / "adapters.safetensors"))
    parameters = {"rank": _RANK, "scale": 1.0, "dropout": 0.0}
    described = {"fine_tune_type": "lora", "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(described))
