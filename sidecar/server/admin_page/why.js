// Why a prompt was not warm: the sums by cause, and each request that lost something.

import { buttons, byId, clock, count, el, seconds, table } from "./dom.js";
import { action, copy } from "./api.js";

const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "");

function place(w) {
  if (w.before === null && w.now === null) return "";
  return el("span", { "data-as": `${w.before}|${w.now}` },
    `message ${w.message + 1} (${w.role}): `, el("code", {}, w.before || "(end)"), " then, ", el("code", {}, w.now || "(end)"), " now");
}

function rule(w) {
  return el("details", { "data-as": w.rule }, el("summary", {}, `A rule for ${w.remedy}`), el("pre", {}, w.rule),
    buttons("rule", el("button", { type: "button", onclick: action(() => copy(w.rule)), "aria-label": "Copy the rule" }, "Copy the rule")));
}

function remedy(w) {
  if (!w.remedy) return "";
  if (w.rule) return rule(w);
  return buttons(w.remedy, el("code", {}, w.remedy),
    el("button", { type: "button", onclick: action(() => copy(w.remedy)), "aria-label": `Copy ${w.remedy}` }, "Copy"));
}

export function why() {
  const causes = table(byId("causes-body"), "By cause, since the start", [
    { head: "Cause", cell: (c) => c.cause },
    { head: "Times", number: true, cell: (c) => count(c.times) },
    { head: "Tokens computed again", number: true, cell: (c) => count(c.lost) },
    { head: "Seconds", number: true, cell: (c) => seconds(c.lost_s) },
  ], (c) => c.cause, "Every chat so far was as warm as it could be.");
  const rows = table(byId("why-body"), "What was computed again, and what would mend it", [
    { head: "At", cell: (r) => clock(r.at) },
    { head: "Client", cell: (r) => r.client || "" },
    { head: "Cause", cell: (r) => r.warmth.cause },
    { head: "In words", cell: (r) => r.warmth.detail },
    { head: "Where", cell: (r) => place(r.warmth) },
    { head: "Lost", number: true, cell: (r) => count(r.warmth.lost) },
    { head: "Cost", number: true, cell: (r) => seconds(r.warmth.lost_s) },
    { head: "Reused", number: true, cell: (r) => share(r.cached_tokens, r.prompt_tokens) },
    { head: "Remedy", cell: (r) => remedy(r.warmth) },
  ], (r) => `${r.request_id}|${r.at}`, "Nothing to say.");
  return (now) => { causes(now.causes); rows(now.ended.filter((r) => r.warmth.cause)); };
}
