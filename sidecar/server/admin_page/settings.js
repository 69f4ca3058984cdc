// Settings: value, who said it, default, range; those that act now can be changed.

import { badge, buttons, byId, el, table } from "./dom.js";
import { action, get, post, say } from "./api.js";

const text = (value) => (value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value));

function told(changed) {
  if (!changed.length) return "Nothing has changed.";
  return changed.map((c) => `${c.name} is ${text(c.new) || "the default"}` +
    (c.shadowed_by ? `, but ${c.shadowed_by} says another value, which wins` : ` (acts ${c.acts})`)).join("; ");
}

export function settings() {
  let rows = [];
  const show = table(byId("settings-body"), "Later wins: default, settings.json, .env, environment, flag", [
    { head: "Name", cell: (s) => el("code", { "data-as": s.name }, s.name) },
    { head: "Value", cell: value },
    { head: "From", cell: (s) => s.origin + (s.saved !== null ? `; hides ${s.saved}` : "") },
    { head: "Default", cell: (s) => text(s.default) },
    { head: "Takes", cell: (s) => s.takes },
    { head: "Acts", cell: (s) => badge(s.acts, s.acts === "now" ? "good" : "quiet") },
    { head: "Meaning", cell: (s) => s.help },
  ], (s) => s.name, "No setting has that name.");

  function value(s) {
    if (s.acts !== "now") return text(s.value);
    const field = el("input", { value: text(s.value), "aria-label": `Value of ${s.name}`, size: 10 });
    const save = el("button", { type: "button", "aria-label": `Save ${s.name}`, onclick: action(async () => {
      const answer = await post("/admin/settings", { [s.name]: field.value.trim() === "" ? null : field.value });
      await look();
      return told(answer.changed);
    }) }, "Save");
    return buttons(`${s.name}|${text(s.value)}`, field, save);
  }

  function filter() {
    const word = byId("settings-find").value.toLowerCase();
    show(rows.filter((s) => s.name.toLowerCase().includes(word) || s.help.toLowerCase().includes(word)));
  }

  async function look() {
    rows = (await get("/admin/settings")).settings;
    filter();
  }

  byId("settings-find").addEventListener("input", filter);
  byId("reload").addEventListener("click", action(async () => {
    const answer = await post("/admin/reload-config");
    await look();
    return told(answer.changed);
  }));
  look().catch((error) => { byId("settings-body").replaceChildren(el("p", { class: "quiet" }, error.message)); });
  return () => {};
}
