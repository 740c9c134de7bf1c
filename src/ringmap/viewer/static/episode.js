// One episode, or several beside each other: films, charts and texts with one cursor.
import { Refused, answered, api, ask, asJson, count, el, link, mark, nbytes, note, toggled, told } from "./lib.js";
import { Chart, unpack } from "./charts.js";
import { Film } from "./film.js";

const SPEEDS = [1, 2, 5, 10, 15, 30, 60, 120];

// The cursor: a step that everything shows, moved by keys, a slider, a click, or time.
class Cursor {
  constructor(page, length, query) {
    this.length = length;
    this.step = Math.max(0, Math.min(length - 1, Number(query.get("t")) || 0));
    this.speed = 3;
    this.followers = [];
    this.zoom = () => {}; // in or out by a factor around the step; null: all
    this.slider = el("input", { type: "range", min: "0", max: String(Math.max(0, length - 1)), value: String(this.step), "aria-label": "Step", oninput: () => this.to(Number(this.slider.value)) });
    this.play = el("button", { type: "button", onclick: () => this.toggle(), "aria-pressed": "false", title: "Space" }, "Play");
    this.said = el("span", { class: "quiet" });
    this.pace = el("span", { class: "quiet" });
    this.root = el("div", { class: "bar", role: "group", "aria-label": "Cursor" }, this.play, el("button", { type: "button", title: "Left arrow", onclick: () => this.to(this.step - 1) }, "‹ step"), el("button", { type: "button", title: "Right arrow", onclick: () => this.to(this.step + 1) }, "step ›"), this.slider, this.said, this.pace);
    const keys = (event) => this.key(event);
    document.addEventListener("keydown", keys);
    page.later.push(() => { document.removeEventListener("keydown", keys); cancelAnimationFrame(this.frame); clearTimeout(this.note); });
    this.faster(0);
  }

  key(event) {
    const inside = event.target.closest?.("input[type=text],input[type=search],textarea,select");
    if (inside || event.ctrlKey || event.metaKey || event.altKey) return;
    const by = event.shiftKey ? 10 : 1;
    const act = {
      " ": () => this.toggle(), ArrowRight: () => this.to(this.step + by), ArrowLeft: () => this.to(this.step - by),
      Home: () => this.to(0), End: () => this.to(this.length - 1), ",": () => this.faster(-1), ".": () => this.faster(1),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.zoom(null),
    }[event.key];
    if (!act || (event.key === " " && event.target.closest?.("button,summary"))) return;
    event.preventDefault();
    act();
  }

  faster(by) {
    this.speed = Math.max(0, Math.min(SPEEDS.length - 1, this.speed + by));
    this.pace.textContent = `${SPEEDS[this.speed]} steps/s`;
  }

  toggle() {
    this.playing = !this.playing;
    this.play.textContent = this.playing ? "Pause" : "Play";
    this.play.setAttribute("aria-pressed", String(!!this.playing));
    if (!this.playing) return cancelAnimationFrame(this.frame);
    if (this.step >= this.length - 1) this.to(0);
    let before = performance.now(), part = 0;
    const tick = (now) => {
      part += ((now - before) / 1000) * SPEEDS[this.speed];
      before = now;
      if (part >= 1) {
        this.to(this.step + Math.floor(part));
        part %= 1;
      }
      if (this.step >= this.length - 1) return this.toggle();
      this.frame = requestAnimationFrame(tick);
    };
    this.frame = requestAnimationFrame(tick);
  }

  to(step) {
    this.step = Math.max(0, Math.min(this.length - 1, Math.round(step)));
    this.slider.value = String(this.step);
    this.said.textContent = `step ${count(this.step)} of ${count(this.length)}`;
    for (const follower of this.followers) follower.at(this.step);
    clearTimeout(this.note);
    this.note = setTimeout(() => { // the address can be sent to somebody
      const [path, query] = location.hash.split("?"), q = new URLSearchParams(query || "");
      q.set("t", this.step);
      history.replaceState(null, "", `${path}?${q}`);
    }, 250);
  }
}

class Texts {
  constructor(page, key, id, column) {
    Object.assign(this, { page, key, id, column, from: 0, values: [] });
    this.said = el("p", { class: "said" });
    this.root = el("section", { class: "chart", "aria-label": column.name }, el("h3", {}, column.name), this.said);
  }
  async at(step) {
    this.wanted = step;
    if (!(step >= this.from && step < this.from + this.values.length)) {
      try {
        const found = await asJson("text", { p: this.key, e: this.id, c: this.column.name, start: Math.max(0, step - 50), n: 200 }, { signal: this.page.signal });
        this.from = found.start;
        this.values = found.values;
      } catch (error) {
        if (error.name !== "AbortError" && this.wanted === step) this.said.textContent = `(${error.message})`;
        return;
      }
    }
    if (this.wanted === step) this.said.textContent = told(this.values[step - this.from]) || "–";
  }
}

// Charts of columns, of one episode or several, that zoom together.
class Charts {
  constructor(page, episodes, cursor, failed) {
    Object.assign(this, { page, episodes, cursor, failed, turn: 0 });
    this.length = Math.max(...episodes.map((e) => e.length));
    this.low = 0;
    this.high = Math.max(1, this.length - 1);
    this.columns = episodes[0].columns.filter((c) => c.kind === "lines" && (episodes.length === 1 || c.lines <= 8));
    cursor.zoom = (by) => (by === null ? this.zoom(null, null) : this.zoom(cursor.step - (cursor.step - this.low) * by, cursor.step + (this.high - cursor.step) * by));
    const on = { moved: (step) => cursor.to(step), zoomed: (low, high) => this.zoom(low, high) };
    this.charts = this.columns.map((c) => {
      const own = Array.from({ length: c.lines }, (_, i) => String(i));
      const labels = episodes.length === 1 ? (c.lines > 1 ? own : [c.name]) : episodes.flatMap((e) => own.map((i) => (c.lines > 1 ? `${e.called} [${i}]` : e.called)));
      return new Chart(c.name, labels, on);
    });
    this.root = el("div", { class: "charts" }, this.charts.map((c) => c.root));
    const size = new ResizeObserver(() => this.charts.forEach((c) => c.resize()));
    size.observe(this.root);
    page.later.push(() => size.disconnect());
  }
  at(step) {
    for (const chart of this.charts) chart.at(step);
  }
  zoom(low, high) {
    this.low = low === null ? 0 : Math.max(0, low);
    this.high = high === null ? Math.max(1, this.length - 1) : Math.min(Math.max(1, this.length - 1), high);
    if (this.high - this.low < 2) this.high = this.low + 2;
    clearTimeout(this.later);
    this.later = setTimeout(() => this.load(), 60);
  }
  async load() {
    if (!this.columns.length) return;
    const mine = ++this.turn, start = Math.floor(this.low), end = Math.ceil(this.high) + 1;
    try {
      const found = await Promise.all(this.episodes.map(async (e) => {
        const stop = Math.min(e.length, end);
        if (start >= stop) return null;
        return unpack(await (await ask("columns", { p: e.p, e: e.id, c: this.columns.map((c) => c.name), start, end: stop, points: 2000 }, { signal: this.page.signal })).arrayBuffer());
      }));
      if (mine !== this.turn) return;
      const longest = found.reduce((a, b) => (b && (!a || b.end > a.end) ? b : a), null);
      if (!longest) return; // no steps
      this.columns.forEach((column, i) => {
        const lines = found.flatMap((f) => {
          if (!f) return Array.from({ length: column.lines }, () => []);
          const values = f.columns[i].values;
          if (f === longest) return values;
          if (!f.thinned && !longest.thinned) return values;
          return values.map((v) => onto(longest.steps, f.steps, v));
        });
        const padded = lines.map((v) => { const all = Array.from(v); while (all.length < longest.steps.length) all.push(NaN); return all; });
        this.charts[i].set(longest.steps, padded, this.low, this.high);
      });
      this.at(this.cursor.step);
    } catch (error) {
      if (error.name !== "AbortError") this.failed(error);
    }
  }
}

function onto(target, steps, values) {
  let j = 0;
  return Array.from(target, (t) => {
    while (j + 1 < steps.length && steps[j + 1] <= t) j++;
    return t > steps[steps.length - 1] ? NaN : values[j];
  });
}

// Saves what a link leads to; a link alone could not say why there is no file.
async function save(event, failed) {
  event.preventDefault();
  const link_ = event.currentTarget;
  if (link_.ariaBusy) return;
  link_.ariaBusy = "true";
  try {
    const reply = await answered(fetch(link_.href));
    const name = /filename="([\w.-]+)"/.exec(reply.headers.get("content-disposition"))?.[1];
    const url = URL.createObjectURL(await reply.blob());
    el("a", { href: url, download: name || "episode" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  } catch (error) {
    failed(error);
  } finally {
    link_.ariaBusy = null;
  }
}

// Flags and a note: shown, and changed where that is allowed.
function marksOf(page, key, e, about) {
  const said = el("span", { class: "quiet", role: "status" });
  if (!about.can_mark) {
    if (!e.flags.length && !e.note) return "";
    return el("p", { class: "bar" }, e.flags.map((f) => el("span", { class: "tag flag" }, f)), el("span", {}, e.note));
  }
  const flags = el("input", { type: "text", id: "flags", value: e.flags.join(" "), placeholder: "bad slow", spellcheck: "false", autocomplete: "off" });
  const text = el("input", { type: "text", id: "note", value: e.note, maxlength: "4000", autocomplete: "off" });
  const words = () => flags.value.split(/[\s,]+/).filter(Boolean);
  const save = async () => {
    said.className = "quiet";
    said.textContent = "Saving";
    try {
      const row = await mark(key, e.id, { flags: words(), note: text.value });
      flags.value = row.flags.join(" ");
      said.textContent = row.flags.length || row.note ? "Saved" : "Saved: no mark";
    } catch (error) {
      said.className = "bad";
      said.textContent = error.message;
    }
  };
  const key_ = (event) => {
    if (event.key !== "b" || event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input,textarea,select")) return;
    flags.value = toggled(words()).join(" ");
    save();
  };
  document.addEventListener("keydown", key_);
  page.later.push(() => document.removeEventListener("keydown", key_));
  return el("form", { class: "bar", "aria-label": "Mark", onsubmit: (event) => { event.preventDefault(); save(); } },
    el("span", { class: "field" }, el("label", { for: "flags" }, "Flags"), flags), el("span", { class: "field" }, el("label", { for: "note" }, "Note"), text), el("button", {}, "Save"), said);
}

const describe = (e) => [count(e.length, "step"), e.verified ? "checksum verified" : null, nbytes(e.nbytes)].filter(Boolean).join(" · ");

export async function episodePage(page, main, key, id, query, about) {
  const e = { ...(await asJson("episode", { p: key, e: id }, { signal: page.signal })), p: key };
  const wrong = el("div", {});
  const failed = (error) => wrong.replaceChildren(note(error.status === 410 ? "This episode was evicted. What was loaded before stays." : error.message));
  const cursor = new Cursor(page, e.length, query);
  const films = e.columns.filter((c) => c.kind === "picture").map((c) => new Film(page, key, e.id, c, e.length));
  const texts = e.columns.filter((c) => c.kind === "text").map((c) => new Texts(page, key, e.id, c));
  const charts = new Charts(page, [e], cursor, failed);
  for (const film of films) film.failed = failed;
  cursor.followers.push(...films, ...texts, charts);
  const other = (to, text, title) => (to ? el("a", { href: link(["p", key, "e", to]), title }, text) : el("span", { class: "quiet" }, text));
  const file = (as, c, name) => el("a", { href: api("download", { p: key, e: e.id, as, c }), title: c ? `${name} of ${c}` : null, onclick: (event) => save(event, failed) }, name);
  const files = [file("hdf5", null, "HDF5"), ...films.flatMap(({ column: { name } }) => [films.length > 1 ? ` · ${name}: ` : ", ", file("mp4", name, "mp4"), ", ", file("png", name, "PNG strip")])];
  const left = e.columns.filter((c) => c.kind === "none");
  main.replaceChildren(
    el("h1", {}, `Episode ${count(e.episode)}`),
    el("p", { class: "bar" }, other(e.before, "‹ older", "Older episode"), other(e.after, "newer ›", "Newer episode"), el("span", { class: "quiet" }, describe(e)), el("span", {}, "Download: ", files)),
    wrong, e.damaged ? note(`Damaged: ${e.damaged}`) : "", marksOf(page, key, e, about),
    el("div", { class: "films" }, films.map((f) => f.root)), cursor.root, charts.root,
    texts.length ? el("div", { class: "charts" }, texts.map((t) => t.root)) : "",
    Object.keys(e.data).length ? el("div", {}, el("h2", {}, "Episode data"), el("dl", { class: "facts" }, Object.entries(e.data).map(([n, v]) => el("div", {}, el("dt", {}, n), el("dd", {}, told(v)))))) : "",
    left.length ? el("div", {}, el("h2", {}, "Not drawn"), el("ul", {}, left.map((c) => el("li", {}, `${c.name}: ${c.reason}`)))) : "",
    el("p", { class: "quiet" }, "Space plays. Arrows step, with shift by ten. Comma and period change the speed." + (about.can_mark ? " The letter b gives the flag bad, or takes it away." : "") + " Drag or turn the wheel over a chart to zoom, or press plus and minus; double-click, or zero, shows all."));
  cursor.to(cursor.step);
  await charts.load();
  page.moved = (q) => { const t = Number(q.get("t")); if (q.has("t") && t !== cursor.step) cursor.to(t); };
  if (about.live) page.follow(key, (state) => {
    if (state.first === null || BigInt(state.first) > BigInt(e.id)) failed({ status: 410 });
  });
}

export async function comparePage(page, main, key, query, about) {
  const ids = (query.get("e") || "").split(",").filter(Boolean).slice(0, 8);
  if (!ids.length) throw new Refused(0, "No episodes are named: choose some in the table.");
  const wrong = el("div", {});
  const failed = (error) => wrong.append(note(error.status === 410 ? "One of these episodes was evicted. What was loaded before stays." : error.message));
  const rings = new Map((about.shards || []).map((ring) => [ring.key, ring.name]));
  const found = await Promise.all(ids.map(async (id) => {
    const [e, p = key] = id.split("-").reverse(); // of a fleet: RING-EPISODE
    try {
      const one = await asJson("episode", { p, e }, { signal: page.signal });
      return { ...one, p, called: rings.has(p) ? `${rings.get(p)} #${one.episode}` : String(one.episode) };
    } catch (error) {
      if (error.name === "AbortError") throw error;
      failed(error);
      return null;
    }
  }));
  const episodes = found.filter((e) => e && e.length);
  if (!episodes.length) return main.replaceChildren(el("h1", {}, "Compare"), wrong);
  const cursor = new Cursor(page, Math.max(...episodes.map((e) => e.length)), query);
  const films = episodes.flatMap((e) => e.columns.filter((c) => c.kind === "picture").slice(0, 2).map((c) => new Film(page, e.p, e.id, c, e.length, `${c.name}, episode ${e.called}`)));
  const charts = new Charts(page, episodes, cursor, failed);
  cursor.followers.push(...films, charts);
  main.replaceChildren(el("h1", {}, "Episodes ", episodes.map((e, i) => [i ? ", " : "", el("a", { href: link(["p", e.p, "e", e.id]) }, e.called)])), wrong, el("div", { class: "films" }, films.map((f) => f.root)), cursor.root, charts.root);
  cursor.to(cursor.step);
  await charts.load();
}
