// The cache: sessions and the tree, looked at when asked; forgetting and clearing.

import { buttons, byId, bytes, count, el, seconds, table } from "./dom.js";
import { action, confirmed, get, post } from "./api.js";

const MAX_ROWS = 500;

export function cache(refresh) {
  const holder = byId("cache-body");
  const summary = el("p", { class: "quiet" });
  const sessions = el("div"), tree = el("div");
  const forget = (s) => buttons(`${s.session}|${s.key}`, el("button", {
    type: "button", "aria-label": `Forget ${s.session}`,
    onclick: action(async () => {
      if (!(await confirmed(`Forget the session ${s.session}? Its next turn is computed anew.`))) return "";
      const gone = await post("/admin/cache/forget", { session: s.session, key: s.key });
      await look();
      return `${bytes(gone.kv_bytes)} came back.`;
    }),
  }, "Forget"));
  const showSessions = table(sessions, "Sessions", [
    { head: "Session", cell: (s) => s.session },
    { head: "Threads", number: true, cell: (s) => count(s.threads) },
    { head: "Messages", number: true, cell: (s) => count(s.messages) },
    { head: "Tokens", number: true, cell: (s) => count(s.tokens) },
    { head: "Idle", number: true, cell: (s) => seconds(s.idle_s) },
    { head: "Do", cell: forget },
  ], (s) => `${s.session}|${s.key}`, "No session is remembered.");
  const showTree = table(tree, `The prefix tree, ${MAX_ROWS} rows at most`, [
    { head: "Depth", number: true, cell: (n) => count(n.start) },
    { head: "to", number: true, cell: (n) => count(n.end) },
    { head: "Hits", number: true, cell: (n) => count(n.hits) },
    { head: "Session", cell: (n) => n.session || "" },
    { head: "Checkpoint", cell: (n) => (n.checkpoint ? "yes" : "") },
  ], (n) => n.name, "Nothing is kept.");

  async function look() {
    const found = await get("/admin/cache");
    if (!holder.children.length) holder.append(summary, sessions, tree);
    summary.textContent = `${found.model}: ${bytes(found.bytes)}; all models: ${bytes(found.bytes_of_all)}` +
      (found.switched_off.length ? `; switched off: ${found.switched_off.join(", ")}` : "");
    showSessions(found.sessions);
    showTree(found.tree.slice(0, MAX_ROWS).map((n, i) => ({ ...n, name: i })));
  }

  byId("show-cache").addEventListener("click", action(look));
  byId("clear-cache").addEventListener("click", action(async () => {
    const state = await get("/admin/state");
    const size = bytes(state.memory.stored_kv);
    if (!(await confirmed(`Clear ${size} of KV? Every conversation's next turn is computed anew.`))) return "";
    const gone = await post("/admin/cache/clear");
    refresh();
    if (holder.children.length) await look();
    return `${bytes(gone.kv_bytes)} came back.`;
  }));
  return () => {};
}
