"""The command `litellm-mlx`: Ctrl-C ends it without a traceback, whenever it comes."""

import sys

_STOPPED_EARLY = 130


def main() -> int:
    """Run it with the arguments of the command line; its exit code."""
    try:
        from litellm_mlx.launcher import commands

        return commands.main()
    except KeyboardInterrupt:  # also while it imports, which takes half a second
        return _STOPPED_EARLY


if __name__ == "__main__":
    sys.exit(main())
