// Requests that run or wait, and the last ones that ended.

import { buttons, byId, clock, count, el, seconds, table } from "./dom.js";
import { action, post } from "./api.js";

const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "");

function stage(r) {
  if (r.state === "queued") return `queued #${r.place}`;
  if (r.state === "decode") return `decode ${count(r.output_tokens)}`;
  return el("span", {}, `prefill ${count(r.done_tokens)} of ${count(r.prompt_tokens)} `,
    el("progress", { max: r.prompt_tokens, value: r.done_tokens, "aria-label": "Part of the prompt that is read" }));
}

function firstToken(r) {
  if (r.ttft_s !== null) return seconds(r.ttft_s);
  return r.predicted_ttft_s === null ? "" : `about ${seconds(r.predicted_ttft_s)}`;
}

export function requests(refresh) {
  const cancel = (r) => buttons(r.request_id, el("button", {
    type: "button", "aria-label": `Cancel ${r.request_id}`,
    onclick: action(async () => {
      await post(`/admin/requests/${encodeURIComponent(r.request_id)}/cancel`);
      refresh();
      return `${r.request_id} is cancelled.`;
    }),
  }, "Cancel"));
  const running = table(byId("running-body"), "Running and waiting", [
    { head: "Client", cell: (r) => r.client || "" },
    { head: "Model", cell: (r) => r.model },
    { head: "Stage", cell: stage },
    { head: "Prompt", number: true, cell: (r) => count(r.prompt_tokens) },
    { head: "Reused", number: true, cell: (r) => share(r.cached_tokens, r.prompt_tokens) },
    { head: "First token", number: true, cell: firstToken },
    { head: "Tokens/s", number: true, cell: (r) => r.rate || "" },
    { head: "Age", number: true, cell: (r) => seconds(r.age_s) },
    { head: "Do", cell: cancel },
  ], (r) => `${r.request_id}|${r.number}`, "Nothing runs.");
  const ended = table(byId("ended-body"), "The last 50 chats", [
    { head: "At", cell: (r) => clock(r.at) },
    { head: "Client", cell: (r) => r.client || "" },
    { head: "Model", cell: (r) => r.model },
    { head: "End", cell: (r) => r.outcome },
    { head: "Prompt", number: true, cell: (r) => count(r.prompt_tokens) },
    { head: "Reused", number: true, cell: (r) => share(r.cached_tokens, r.prompt_tokens) },
    { head: "First token", number: true, cell: (r) => seconds(r.ttft_s) },
    { head: "Output", number: true, cell: (r) => count(r.output_tokens) },
    { head: "Seconds", number: true, cell: (r) => seconds(r.seconds) },
  ], (r) => `${r.request_id}|${r.at}`, "No chat has ended yet.");
  return (now) => { running(now.running); ended(now.ended); };
}
