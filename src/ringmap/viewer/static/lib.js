// What all pages use: elements made without HTML, requests, numbers as people write them.

export function el(name, given = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(given)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "class") made.className = value;
    else if (key in made && key !== "list" && typeof value !== "string") made[key] = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return made;
}

export function api(name, given = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(given)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== null && one !== undefined) query.append(key, one);
  }
  return `api/${name}?${query}`;
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(name, given, options = {}) {
  return answered(fetch(api(name, given), options));
}

// Waits for a reply, and throws what is wrong with it.
export async function answered(asked) {
  let reply;
  try {
    reply = await asked;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the server does not answer; was it ended?");
  }
  if (!reply.ok) {
    let told = `the server answered ${reply.status}`;
    try {
      told = (await reply.json()).error || told;
    } catch {
      if (reply.status === 403) told = "not admitted: open the address that `ringmap view` printed";
    }
    throw new Refused(reply.status, told);
  }
  return reply;
}

// Marks an episode: `given` has flags, a note, or both.
export const mark = async (key, id, given) =>
  (await answered(fetch("api/mark", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ p: key, e: id, ...given }) }))).json();

// With "bad" if it was not there, or else without.
export const toggled = (flags) => (flags.includes("bad") ? flags.filter((f) => f !== "bad") : [...flags, "bad"]);

export const asJson = async (...given) => (await ask(...given)).json();

export const count = (n, noun) => (n === null || n === undefined ? "?" : n.toLocaleString("en") + (noun ? ` ${noun}${n === 1 ? "" : "s"}` : ""));

export function nbytes(n) {
  if (n === null || n === undefined) return "?";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (n < 1000) return `${n < 10 && unit !== "B" ? n.toFixed(1) : Math.round(n)} ${unit}`;
    n /= 1000;
  }
  return `${n.toFixed(1)} TB`;
}

export function number(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (Number.isInteger(x) && Math.abs(x) < 1e9) return String(x);
  const size = Math.abs(x);
  return size >= 1e6 || (size < 1e-3 && size > 0) ? x.toExponential(3) : String(Number(x.toPrecision(5)));
}

export function ago(s) {
  if (s === null || s === undefined) return "–";
  if (s < 2) return "just now";
  if (s < 120) return `${Math.round(s)} s ago`;
  if (s < 7200) return `${Math.round(s / 60)} min ago`;
  return s < 172800 ? `${Math.round(s / 3600)} h ago` : `${Math.round(s / 86400)} days ago`;
}

export const told = (value) => (value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : typeof value === "number" ? number(value) : String(value));

export const note = (text) => el("p", { class: "note", role: "alert" }, text);

export const colours = ["#3b7dd8", "#d9822b", "#2e9e5b", "#c2439b", "#8a6bd1", "#1fa3a3", "#c0392b", "#8a8a2b"];

export function link(parts, query = {}) {
  const kept = new URLSearchParams(Object.entries(query).filter(([, v]) => v !== null && v !== undefined && v !== ""));
  return "#/" + parts.map(encodeURIComponent).join("/") + (kept.size ? `?${kept}` : "");
}

export function read() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const plain = (part) => {
    try {
      return decodeURIComponent(part);
    } catch { // no address of ours
      return part;
    }
  };
  return { parts: path.split("/").filter(Boolean).map(plain), query: new URLSearchParams(query || "") };
}
