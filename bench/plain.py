"""
Plain `mlx_lm.stream_generate` in a process of its own: the floor of every server.

As a module it is that process: `python -m bench.plain MODEL` reads one JSON request a
line and answers each with one JSON line. `PlainProcess` is the other end.
"""

import sys
import time
from typing import Any

from bench.clients import Answer
from bench.piped_process import PipedProcess, serve


class PlainProcess(PipedProcess):
    """The parent's end of the process; it answers one prompt at a time."""

    def complete(self, prompt: str | list[int], max_tokens: int) -> Answer:
        """Generate greedily; times are of the process itself, on its own clock."""
        return Answer(**self.ask({"prompt": prompt, "max_tokens": max_tokens}))

    def multiplied(self, dtype: str) -> float:
        """Floating point operations a second of the device in large matrices."""
        return float(self.ask({"dtype": dtype})["flops"])


def main(folder: str) -> None:
    """Serve stdin until it ends."""
    from mlx_lm import load

    model, tokenizer = load(folder)
    serve(
        lambda request: (
            {"flops": _multiplied(request["dtype"])}
            if "dtype" in request
            else _generate(model, tokenizer, **request)
        )
    )


def _multiplied(dtype: str, size: int = 4096, times: int = 10) -> float:
    """The best of three; a CPU takes smaller matrices."""
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.cpu):
        size, times = 1024, 3
    left, right = (mx.random.normal((size, size)).astype(getattr(mx, dtype))
                   for _ in "ab")  # fmt: skip
    mx.eval(left, right)
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        mx.eval([left @ right for _ in range(times)])
        seconds.append(time.perf_counter() - started)
    return 2.0 * size**3 * times / min(seconds[1:])


def _generate(
    model: Any, tokenizer: Any, prompt: str | list[int], max_tokens: int
) -> dict[str, Any]:
    from mlx_lm import stream_generate

    text: list[str] = []
    times: list[float] = []
    response: Any = None
    started = time.perf_counter()
    for response in stream_generate(model, tokenizer, prompt, max_tokens=max_tokens):
        if response.text:
            text.append(response.text)
            times.append(time.perf_counter())
    times = times or [time.perf_counter()]  # tokens that make no character yet
    return {
        "started": started,
        "first": times[0],
        "last": times[-1],
        "text": "".join(text),
        "num_prompt": response.prompt_tokens,
        "num_cached": 0,
        "num_generated": response.generation_tokens,
    }


if __name__ == "__main__":
    main(sys.argv[1])
