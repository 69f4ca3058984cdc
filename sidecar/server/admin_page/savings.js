// What reuse has saved.

import { byId, count, seconds, table } from "./dom.js";

export function savings() {
  const show = table(byId("savings-body"), "Seconds not spent: each reused token times the measured seconds of a token", [
    { head: "Since", cell: (s) => s.name },
    { head: "Prompt tokens", number: true, cell: (s) => count(s.prompt_tokens) },
    { head: "Reused", number: true, cell: (s) => count(s.reused_tokens) },
    { head: "Computed", number: true, cell: (s) => count(s.computed_tokens) },
    { head: "Time not spent", number: true, cell: (s) => seconds(s.saved_s) },
  ], (s) => s.key, "");
  return (now) => show([
    { key: "start", name: "the server's start", ...now.savings.start },
    { key: "today", name: "midnight", ...now.savings.today },
    { key: "total", name: now.savings.since, ...now.savings.total },
  ]);
}
