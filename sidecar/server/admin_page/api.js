// Asks the server, with the key if it wants one; says what went wrong.

import { byId } from "./dom.js";

const NAME = "litellm-mlx-key";
const WRONG = /not the ADMIN_TOKEN|valid key/;
let waiting = null, isLeft = false;

function key() { return sessionStorage.getItem(NAME); }

function head(more = {}) {
  const own = key();
  return own ? { ...more, Authorization: `Bearer ${own}` } : more;
}

// One dialog, however many ask.
function askForKey(text) {
  waiting ||= new Promise((resolve) => {
    const dialog = byId("key");
    if (text) byId("key-text").textContent = text;
    dialog.addEventListener("close", () => {
      const given = byId("key-value").value;
      byId("key-value").value = "";
      waiting = null;
      if (given) sessionStorage.setItem(NAME, given);
      else isLeft = true;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return waiting;
}

export function forgetKey() {
  sessionStorage.removeItem(NAME);
  location.reload();
}

// A code in the fragment, as `litellm-mlx admin` opens the page with, is good once.
export async function takeCode() {
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  if (!code) return;
  history.replaceState(null, "", location.pathname);
  const answer = await fetch("/admin/exchange", {
    method: "POST", headers: { "Content-Type": "application/json", "X-Admin": "1" },
    body: JSON.stringify({ code }),
  });
  if (answer.ok) sessionStorage.setItem(NAME, (await answer.json()).key);
}

async function read(answer) {
  const text = await answer.text();
  let body = {};
  try { body = JSON.parse(text); } catch { /* not ours */ }
  if (answer.ok) return body;
  const message = body.error?.message || body.detail || `${answer.status} ${answer.statusText}`;
  const error = new Error(message);
  error.status = answer.status;
  throw error;
}

async function send(path, options) {
  const answer = await fetch(path, { cache: "no-store", ...options(), signal: AbortSignal.timeout(60000) });
  byId("logout").hidden = !key();
  try {
    return await read(answer);
  } catch (error) {
    const isWrong = answer.status === 401 || (answer.status === 403 && WRONG.test(error.message));
    if (!isWrong || isLeft) throw error;
    await askForKey(answer.status === 403 ? "That was not the key." : "");
    return send(path, options);
  }
}

export const get = (path) => send(path, () => ({ headers: head() }));

export const post = (path, body = {}) => send(path, () => ({
  method: "POST",
  headers: head({ "Content-Type": "application/json", "X-Admin": "1" }),
  body: JSON.stringify(body),
}));

export function say(text, tone = "") {
  const place = byId("message");
  place.className = tone;
  place.textContent = text;
}

export function confirmed(text) {
  const dialog = byId("ask");
  byId("ask-text").textContent = text;
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok"), { once: true });
    dialog.showModal();
  });
}

// What a button does: it is off until the answer is there, which is said.
export function action(work) {
  return async (event) => {
    const button = event.currentTarget;
    button.disabled = true;
    try {
      const text = await work();
      if (text) say(text, "good");
    } catch (error) {
      say(error.message, "bad");
    } finally {
      button.disabled = false;
    }
  };
}

export async function copy(text) {
  await navigator.clipboard.writeText(text);
  return "Copied.";
}
