// How clients are started on the local model.

import { buttons, byId, count, el, table } from "./dom.js";
import { action, copy } from "./api.js";

const CLIENTS = ["claude", "openclaw", "pi", "codex", "opencode", "qwen"];

export function clients() {
  const show = table(byId("clients-body"), "Nothing of yours is written", [
    { head: "Client", cell: (c) => c.name },
    { head: "Line", cell: (c) => el("code", { "data-as": c.line }, c.line) },
    { head: "Model", cell: (c) => c.model },
    { head: "Context", number: true, cell: (c) => count(c.context) },
    { head: "Do", cell: (c) => buttons(c.line, el("button", {
      type: "button", "aria-label": `Copy the line of ${c.name}`, onclick: action(() => copy(c.line)),
    }, "Copy")) },
  ], (c) => c.name, "");
  return (now) => {
    const context = now.models[0]?.max_input_tokens;
    show(CLIENTS.map((name) => ({ name, line: `.venv/bin/litellm-mlx launch ${name}`, model: "local", context })));
  };
}
