"""
`litellm-mlx admin [--print]`: opens the admin page of the running sidecar.

Where a key is needed, the page is given a code that is good once, for a minute: a key
never stands in an address.
"""

import argparse
import sys
import webbrowser
from collections.abc import Sequence

import httpx

from litellm_mlx.launcher.running import found_settings
from litellm_mlx.launcher.settings import LaunchSettings


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 opened, 1 it does not answer, 2 bad usage."""
    parser = argparse.ArgumentParser(prog="litellm-mlx admin", description=__doc__)
    parser.add_argument("--print", action="store_true", help="print the address alone")
    options = parser.parse_args(argv)
    try:
        url = page_address(found_settings())
    except httpx.HTTPStatusError as error:
        sys.stderr.write(f"litellm-mlx admin: {_why(error.response)}\n")
        return 1
    except (httpx.HTTPError, ValueError, KeyError) as error:
        sys.stderr.write(f"litellm-mlx admin: the sidecar does not answer: {error}\n")
        return 1
    sys.stdout.write(f"{url}\n")
    if not options.print:
        webbrowser.open(url)
    return 0


def _why(answer: httpx.Response) -> str:
    where = f"{answer.url.scheme}://{answer.url.netloc.decode()}"
    if answer.status_code in (401, 403):
        return f"the sidecar at {where} wants another key: ADMIN_TOKEN or MLX_API_KEY"
    return f"what answers at {where} is no sidecar ({answer.status_code})"


def page_address(settings: LaunchSettings) -> str:
    """
    Where the page is, with a code if it needs a key.

    Raises:
        httpx.HTTPError: the sidecar does not answer, or refuses the key.
    """
    page = f"{settings.sidecar.url}/admin/"
    key = settings.admin_token or settings.api_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(trust_env=False, timeout=10.0) as client:
        if key is None:
            answer = client.get(page).raise_for_status()
            if "x-request-id" not in answer.headers:
                raise ValueError("something else is there")
            return page
        answer = client.post(f"{page}code", headers=headers, json={})
        answer.raise_for_status()
        return f"{page}#code={answer.json()['code']}"
