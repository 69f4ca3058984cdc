"""LiteLLM custom provider for the local MLX sidecar: `litellm_mlx.mlx_llm`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from litellm_mlx.provider import MLXProvider

    mlx_llm: MLXProvider

__all__ = ["__version__", "mlx_llm"]

__version__: str


def __getattr__(name: str) -> "MLXProvider | str":
    """Load the provider on first use: `import litellm` alone takes seconds."""
    if name == "__version__":
        import importlib.metadata

        return importlib.metadata.version("litellm-mlx")
    if name != "mlx_llm":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from litellm_mlx.provider import mlx_llm

    return mlx_llm
