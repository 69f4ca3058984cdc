"""Who takes part in a comparison: how each is started and asked."""

import contextlib
import importlib.util
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from bench.clients import Answer, Json, chat
from bench.report import InvalidRun
from bench.servers import Setup, mlx_lm_server, peer_server, sidecar

_KNOWN_PEERS = {  # name -> a module that tells it is installed, how it is started
    "mlx_vlm.server": (
        "mlx_vlm",  # its template switches thinking off unless told
        "python -m mlx_vlm.server --port {port} --model {model} --enable-thinking",
    ),
    "vllm-mlx": ("vllm_mlx", "vllm-mlx serve {model} --port {port}"),
    "Rapid-MLX": ("rapid_mlx", "rapid-mlx serve {model} --port {port}"),
}  # fmt: skip


@dataclass
class Server:
    """One contestant and what was measured of it, by metric."""

    name: str
    port: int
    model: str = "local"
    seen: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    peak_bytes: int = 0

    def ask(self, talks: list[list[Json]], max_tokens: int) -> list[Answer]:
        """Answers of equal work; notes the memory in use."""
        answers = chat(self.port, talks, max_tokens, self.model)
        self.peak_bytes = max(self.peak_bytes, _rss(self.port))
        for answer in answers:
            if answer.num_generated != max_tokens:
                raise InvalidRun(f"{self.name} ended after {answer.num_generated}")
        return answers


def known_peers(asked: Sequence[str]) -> dict[str, str]:
    """
    Name -> command of further servers: those installed, and those asked for.

    Args:
        asked: each `NAME=COMMAND`.
    """
    installed = {
        name: command
        for name, (module, command) in _KNOWN_PEERS.items()
        if importlib.util.find_spec(module)
    }
    return {**installed, **dict(peer.split("=", 1) for peer in asked)}


def contestants(
    setup: Setup, peers: Mapping[str, str], running: contextlib.ExitStack
) -> Iterator[Server]:
    """All servers, running until `running` is closed."""
    yield Server("litellm-mlx", running.enter_context(sidecar(setup)))
    if importlib.util.find_spec("litellm"):  # a lent GPU machine may not have it
        from testkit.proxy import running_proxy

        # One of its own: what the first one was asked would not be new.
        url = f"http://127.0.0.1:{running.enter_context(sidecar(setup))}"
        proxy = running.enter_context(running_proxy(url, setup.scratch))
        yield Server("litellm-mlx, proxy", int(proxy.url.rpartition(":")[2]))
    port = running.enter_context(mlx_lm_server(setup))
    yield Server("mlx_lm.server", port, "default_model")
    for name, command in peers.items():
        port = running.enter_context(peer_server(setup, name, command))
        yield Server(name, port, str(setup.model))


def _rss(port: int) -> int:
    """Bytes of the process that was started for a port, children included."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if str(port) in process.cmdline():
                total += process.memory_info().rss
    return total
