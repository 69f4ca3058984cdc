"""
Where LiteLLM finds the user's own handlers: beside the user's config.

LiteLLM looks beside the config that it is started with, and that is a generated one
elsewhere. The folder goes on the path behind all else: in front of it, a file there
that is named like one of Python's would run in its place.
"""

import os
import sys

NAME = "MLX_HANDLERS_FOLDER"


def install() -> None:
    """Put the folder that the launcher names on the path; once."""
    folder = os.environ.get(NAME)  # noqa: TID251 - of the launcher, no setting
    if folder and folder not in sys.path:
        sys.path.append(folder)
