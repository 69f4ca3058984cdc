"""
LiteLLM's proxy as its command `litellm` runs it, a fifth sooner.

What it imports are millions of objects that stay. The garbage collector looks through
them again and again: 8.5 s instead of 6.6 on a CPU, and later while requests wait.
"""

import contextlib
import gc


def main() -> None:
    """Run the proxy with the arguments of the command line."""
    gc.disable()
    with contextlib.suppress(ModuleNotFoundError):  # LiteLLM says how to mend that
        import litellm.proxy.proxy_server  # noqa: F401 - its command begins with it
    from litellm import run_server

    gc.freeze()
    gc.enable()
    run_server(prog_name="litellm")


if __name__ == "__main__":
    main()
