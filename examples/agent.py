"""
An agent with tools and pictures, on the openai SDK and a local model.

    python examples/agent.py "Which files are here, and what does notes.txt say?"
    python examples/agent.py "What is in this picture?" --image photo.png

It may list and read files below its folder, nothing else. Each turn sends the whole
conversation again; what of it was read from the cache stands at the end of each line.
"""

import argparse
import base64
import json
import mimetypes
from pathlib import Path
from typing import Any

import openai

SYSTEM = "You are a careful agent. Use the tools to look before you answer."
MAX_TURNS = 20
MAX_CHARACTERS = 20_000
PATH = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "below the folder"}},
    "required": ["path"],
}


def function(name: str, description: str) -> Any:
    """A tool as the chat format has it."""
    told = {"name": name, "description": description, "parameters": PATH}
    return {"type": "function", "function": told}


TOOLS = [
    function("list_files", "Names of the files in a folder."),
    function("read_file", "The text of a file."),
]


class Agent:
    """
    One conversation.

    Args:
        folder: what the tools may see. session: names the conversation, so that the
            server knows it again whatever changes in its messages.
    """

    def __init__(
        self, client: openai.OpenAI, model: str, folder: Path, session: str
    ) -> None:
        self._client = client
        self._model = model
        self._folder = folder.resolve()
        self._session = session
        self._messages: list[Any] = [{"role": "system", "content": SYSTEM}]

    def ask(self, question: str, images: list[Path]) -> str:
        """
        Answer a question; tools run until the model calls none.

        Raises:
            openai.APIError: the server refused, or cannot be reached.
            RuntimeError: no answer within so many turns.
        """
        parts: list[Any] = [{"type": "text", "text": question}]
        parts += [{"type": "image_url", "image_url": {"url": url(i)}} for i in images]
        content: Any = parts if images else question
        self._messages.append({"role": "user", "content": content})
        for _ in range(MAX_TURNS):
            message = self._turn()
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                result = self._result(call.function.name, call.function.arguments)
                told = {"role": "tool", "tool_call_id": call.id, "content": result}
                self._messages.append(told)
        raise RuntimeError(f"no answer within {MAX_TURNS} turns")

    def _turn(self) -> Any:
        answer = self._client.chat.completions.create(
            model=self._model,
            messages=self._messages,
            tools=TOOLS,
            extra_body={"session_id": self._session},
        )
        message, usage = answer.choices[0].message, answer.usage
        self._messages.append(message.model_dump(exclude_none=True))
        called = ", ".join(call.function.name for call in message.tool_calls or ())
        details = usage and usage.prompt_tokens_details
        cached = details.cached_tokens if details else 0
        total = usage.prompt_tokens if usage else 0
        print(f"- {called or 'answer'} ({cached} of {total} tokens cached)")
        return message

    def _result(self, name: str, arguments: str) -> str:
        """What a call gives; what went wrong is for the model to read."""
        try:
            path = (self._folder / json.loads(arguments)["path"]).resolve()
            path.relative_to(self._folder)
            if name == "list_files":
                return "\n".join(sorted(entry.name for entry in path.iterdir()))
            if name == "read_file":
                return path.read_text(errors="replace")[:MAX_CHARACTERS]
            return f"there is no tool {name}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"error: {error}"


def url(image: Path) -> str:
    """A picture as a data URL."""
    kind = mimetypes.guess_type(image.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(image.read_bytes()).decode()}"


def main() -> None:
    """Answer one question."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[1])
    parser.add_argument("question")
    parser.add_argument("--image", type=Path, action="append", default=[])
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--model", default="local")
    parser.add_argument("--url", default="http://127.0.0.1:4000/v1")
    parser.add_argument("--key", default="any")
    parser.add_argument("--session", default="example-agent")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=options.url, api_key=options.key, timeout=1200)
    agent = Agent(client, options.model, options.folder, options.session)
    try:
        print(agent.ask(options.question, options.image))
    except (openai.APIError, OSError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
