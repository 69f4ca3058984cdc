"""
How many CUDA graphs MLX keeps.

On CUDA, MLX makes a graph of each new shape of work and keeps the last 400. A server
has more of them, of chats with and without masks, alone and in batches: making one anew
takes 30 to 70 ms on an H100. And once 800 were made in a process, each further one is
an error ("Cache thrashing"): what MLX counts are all misses of its life (lru_cache.h).
"""

from collections.abc import MutableMapping

_DEFAULTS = {
    "MLX_CUDA_GRAPH_CACHE_SIZE": "4000",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}


def keep_cuda_graphs(environ: MutableMapping[str, str]) -> None:
    """Set what MLX reads when it is imported, but for what the user has set."""
    for name, value in _DEFAULTS.items():
        environ.setdefault(name, value)
