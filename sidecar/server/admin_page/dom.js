// Elements and tables. All text of the server enters by textContent.

export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
}

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

// A table whose rows keep their elements from look to look, so that focus stays where it is.
// columns: {head, cell(row) -> text or element, number?}; key(row) names a row.
export function table(holder, caption, columns, key, empty) {
  const body = el("tbody");
  const heads = columns.map((c) => el("th", { scope: "col", class: c.number ? "number" : null }, c.head));
  const made = el("table", { class: "cards" },
    el("caption", {}, caption), el("thead", {}, el("tr", {}, ...heads)), body);
  const nothing = el("p", { class: "quiet" }, empty);
  const frame = el("div", { class: "scroll", role: "region", "aria-label": caption }, made);
  holder.append(frame, nothing);
  const rows = new Map();
  return (data) => {
    const seen = new Set();
    data.forEach((item, place) => {
      const name = key(item);
      seen.add(name);
      let row = rows.get(name);
      if (!row) {
        row = { line: el("tr"), cells: columns.map((c) => el("td", { "data-label": c.head, class: c.number ? "number" : null })) };
        row.line.append(...row.cells);
        rows.set(name, row);
      }
      columns.forEach((column, i) => fill(row.cells[i], column.cell(item)));
      if (body.children[place] !== row.line) body.insertBefore(row.line, body.children[place] || null);
    });
    for (const [name, row] of rows) {
      if (!seen.has(name)) { row.line.remove(); rows.delete(name); }
    }
    frame.hidden = data.length === 0;
    // What can be scrolled must be reached by the keyboard.
    if (frame.scrollWidth > frame.clientWidth) frame.tabIndex = 0;
    else frame.removeAttribute("tabindex");
    nothing.hidden = data.length !== 0;
  };
}

// Text is replaced where it changed; elements with a data-as that is the same stay.
function fill(cell, content) {
  if (content instanceof Element) {
    const as = content.getAttribute("data-as");
    if (as !== null && cell.firstElementChild?.getAttribute("data-as") === as) return;
    cell.replaceChildren(content);
  } else {
    const text = content === null || content === undefined ? "" : String(content);
    if (cell.firstElementChild || cell.textContent !== text) cell.textContent = text;
  }
}

export function badge(text, tone) {
  return el("span", { class: `badge ${tone}`, "data-as": `${text}|${tone}` }, text);
}

export function buttons(as, ...list) {
  return el("div", { class: "row-buttons", "data-as": as }, ...list);
}

export function bytes(n) {
  if (n === null || n === undefined) return "";
  if (n < 1e6) return `${Math.round(n / 1e3)} kB`;
  if (n < 1e9) return `${(n / 1e6).toFixed(0)} MB`;
  return `${(n / 1e9).toFixed(1)} GB`;
}

export const count = (n) => (n === null || n === undefined ? "" : n.toLocaleString("en-US"));

export function seconds(s) {
  if (s === null || s === undefined) return "";
  if (s < 10) return `${s.toFixed(2)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return `${(s / 3600).toFixed(1)} h`;
}

export const clock = (at) => new Date(at * 1000).toLocaleTimeString();
