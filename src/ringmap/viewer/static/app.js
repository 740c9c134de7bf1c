// Which page the address names, and what ends when another one begins.
import { ago, asJson, api, count, el, link, nbytes, note, number, read, told } from "./lib.js";
import { histogram, trend } from "./charts.js";
import { episodeTable } from "./table.js";
import { comparePage, episodePage } from "./episode.js";

const main = document.getElementById("main");
const trail = document.getElementById("trail");
const live = document.getElementById("live");
const STILL_MS = 2000; // after which nothing new means: 0 steps per second
let page = null;
let shown = "";

class Page {
  ending = new AbortController();
  later = [];
  get signal() {
    return this.ending.signal;
  }
  end() {
    this.ending.abort();
    for (const call of this.later) call();
  }
  follow(key, call) {
    let events = null, before = null, retry = 0;
    const wrong = el("div", {});
    let heard = 0;
    const timer = setInterval(() => { if (before && Date.now() - heard >= STILL_MS) call(before, before); }, STILL_MS);
    const listen = () => {
      events?.close();
      clearTimeout(retry);
      if (document.hidden) return; // a browser has six connections for all its tabs
      events = new EventSource(api("events", { p: key }));
      events.onmessage = (message) => {
        const state = JSON.parse(message.data);
        live.className = state.problem ? "bad" : "";
        live.textContent = state.problem ? "not read" : state.live ? "● live" : "";
        if (!state.problem) wrong.remove();
        else if (wrong.textContent !== state.problem || !wrong.isConnected) wrong.replaceChildren(note(state.problem)), main.prepend(wrong);
        heard = Date.now();
        if (!state.problem) call(state, before);
        before = state.problem ? null : state; // another ring may be there after it
      };
      events.onerror = () => {
        live.className = "bad";
        live.textContent = "not connected";
        if (events.readyState === EventSource.CLOSED) retry = setTimeout(listen, STILL_MS); // refused: a browser gives up
      };
    };
    listen();
    document.addEventListener("visibilitychange", listen);
    this.later.push(() => { events?.close(); clearInterval(timer); clearTimeout(retry); document.removeEventListener("visibilitychange", listen); });
  }
}

async function show() {
  const { parts, query } = read();
  const here = parts.join("/");
  if (page?.moved && here === shown) return page.moved(query); // the page itself changed the address
  page?.end();
  const mine = (page = new Page());
  shown = here;
  live.textContent = "";
  trail.replaceChildren();
  try {
    if (!parts.length) await home(mine);
    else if (parts[0] === "p" && parts.length === 2) await place(mine, parts[1], query);
    else if (parts[0] === "p" && parts[2] === "e" && parts.length === 4) {
      const about = await asJson("place", { p: parts[1] }, { signal: mine.signal });
      path(about, `episode`);
      await episodePage(mine, main, parts[1], parts[3], query, about);
    } else if (parts[0] === "p" && parts[2] === "compare") {
      const about = await asJson("place", { p: parts[1] }, { signal: mine.signal });
      path(about, "compare");
      await comparePage(mine, main, parts[1], query, about);
    } else main.replaceChildren(el("h1", {}, "No such page"), el("p", {}, "Look at the ", el("a", { href: "#/" }, "start page"), "."));
  } catch (error) {
    if (error.name === "AbortError" || mine.signal.aborted) return;
    main.replaceChildren(el("h1", {}, "This can't be shown"), note(error.message), el("p", {}, el("a", { href: "#/" }, "Start page")));
    if (!(error.status >= 0)) console.error(error);
  }
  main.focus({ preventScroll: true });
}

function again() {
  shown = "";
  return show();
}

function path(about, last) {
  const name = about.name || "";
  const way = [about.fleet, { key: about.key, name: about.fleet ? about.short : name }].filter(Boolean);
  trail.replaceChildren(...way.flatMap((one, i) => [i ? el("span", {}, "/") : "", el("a", { href: link(["p", one.key]) }, one.name)]), last ? el("span", {}, `/ ${last}`) : "");
  document.title = `${last ? last + " · " : ""}${name} · ringmap`;
}

// A ring of transitions has no episodes, but steps; of a buffer whose rows are not read, they are all that is known.
const hasNone = (about) => about.episodes === null || about.episodes === undefined;
const stored = (p) => (hasNone(p) ? "" : `${count(p.episodes, "episode")}, `) + count(p.steps, p.episodes === null ? "transition" : "step");
const alive = (w, word) => (w.alive ? el("span", { class: "good" }, `${word}alive`) : w.alive === null ? `${word}unknown` : null);
const writerOf = (w) => (w ? alive(w, "writer ") || "no writer" : null);

async function home(mine) {
  document.title = "ringmap view";
  const given = await asJson("places", {}, { signal: mine.signal });
  const list = el("ul", { class: "places" });
  main.replaceChildren(el("h1", {}, `Below ${given.paths.join(", ") || "this process"}`), list);
  const draw = ({ places }) => {
    list.replaceChildren(...places.map(placeCard));
    if (!places.length) list.append(el("li", { class: "quiet" }, "No buffers or datasets yet. This page shows those that come."));
  };
  draw(given);
  const timer = setInterval(async () => {
    try {
      if (!document.hidden) draw(await asJson("places", {}, { signal: mine.signal }));
      live.textContent = "";
    } catch (error) {
      if (error.name !== "AbortError") {
        live.className = "bad";
        live.textContent = "not connected";
      }
    }
  }, 3000);
  mine.later.push(() => clearInterval(timer));
}

function placeCard(p) {
  const bad = p.problem !== null && p.problem !== undefined;
  const kind = { episodes: "ring", transitions: "ring of transitions", distillation: "distillation buffer" }[p.kind] || p.format || p.kind;
  return el("li", { class: "place" },
    p.thumbnail && p.steps ? el("img", { class: "thumb", alt: "", src: api("thumb", { p: p.key, at: p.head ?? p.last }) }) : null,
    el("div", {},
      el("p", {}, bad ? el("strong", {}, p.name) : el("a", { href: link(["p", p.key]) }, p.name), " ", el("span", { class: "tag" }, kind)),
      bad ? el("p", { class: "bad" }, p.problem) : null,
      !bad && p.steps !== undefined ? el("p", {}, stored(p)) : null,
      p.kind === "fleet" ? el("p", {}, `${count(p.rings.length, "ring")}, `, p.writers ? el("span", { class: "good" }, `${count(p.writers, "writer")} alive`) : "no writer") : null,
      el("p", { class: "quiet" }, [p.nbytes !== undefined ? nbytes(p.nbytes) : null, p.committed_s !== undefined && p.committed_s !== null ? `last commit ${ago(p.committed_s)}` : null].filter(Boolean).join(" · "), p.writer ? " · " : "", writerOf(p.writer)),
      p.columns?.length ? el("p", { class: "quiet" }, p.columns.slice(0, 12).join(", ") + (p.columns.length > 12 ? ", …" : "")) : null));
}

const fact = (name, value) => {
  const dd = el("dd", {}, value);
  return { dd, div: el("div", {}, el("dt", {}, name), dd) };
};

async function place(mine, key, query) {
  const about = await asJson("place", { p: key }, { signal: mine.signal });
  path(about);
  main.replaceChildren(el("h1", {}, about.name));
  if (about.problem) return main.append(note(about.problem));
  const draw = about.kind === "fleet" ? fleet(about) : counts(about);
  main.append(about.code ? el("details", {}, el("summary", {}, "Open it in Python"), el("pre", { tabindex: "0" }, about.code)) : "");
  draw(about, null);
  const follow = (call) => about.live && mine.follow(key, (state, before) => {
    if (!about.columns.length && state.steps) return again(); // now there are columns
    draw(state, before);
    call(state, before);
  });
  if (hasNone(about)) {
    columnsOf(about);
    return follow(() => {});
  }
  const spread = el("div", { class: "pair" });
  const table = episodeTable(mine, key, query, about);
  const marksWrong = el("div", {}, about.marks_problem ? note(`Marks: ${about.marks_problem}`) : "");
  main.append(el("h2", {}, "Episodes"), marksWrong, table.root, el("h2", {}, about.shards ? "Length and return, the newest of each ring last" : "Length and return, oldest first"), spread);
  columnsOf(about);
  mine.moved = (q) => table.moved(q);

  let spreadAt = 0;
  async function drawSpread() {
    spreadAt = Date.now();
    const found = await asJson("spread", { p: key }, { signal: mine.signal });
    spread.replaceChildren();
    for (const [name, values] of Object.entries(found)) if (values) spread.append(el("div", {}, trend(name, values)), el("div", {}, histogram(name, values)));
  }
  table.indexed = () => drawSpread().catch(() => {});
  drawSpread().catch(() => {});
  follow((state, before) => {
    if (!before || before.version !== state.version) {
      table.changed();
      if (Date.now() - spreadAt > 3000) drawSpread().catch(() => {});
    }
  });
}

// Tells how many a second, from two counts and the time between them.
function speed() {
  let last = null;
  return (count_, before) => {
    const now = Date.now(), known = before && last && count_ >= last.count ? count(Math.round(((count_ - last.count) * 1000) / Math.max(1, now - last.at))) : "–";
    last = { at: now, count: count_ };
    return known;
  };
}

const percent = (state) => `${((100 * state.steps) / Math.max(1, state.max_steps)).toFixed(1)} %`;
const fillOf = (state) => `${percent(state)} of ${count(state.max_steps)}`;

// What is said of a ring or dataset; returns what draws a new state.
function counts(about) {
  const facts = {};
  const add = (name, value) => (facts[name] = fact(name, value));
  if (!hasNone(about)) add("episodes", count(about.episodes));
  const steps = about.episodes === null ? "transitions" : "steps";
  add(steps, count(about.steps));
  if (about.max_steps) add("fill", "");
  if (about.head !== undefined) add("written", count(about.head)), add("commits", count(about.commits)), add("steps per second", "–"), add("commits per second", "–"), add("redraws of this reader", count(about.redraws));
  const who = (w) => el("span", {}, writerOf(w), w.pid && w.alive ? ` ${w.pid} on ${w.host}` : "");
  if (about.writer) add("writer", who(about.writer));
  if (about.nbytes !== undefined) add("on disk", nbytes(about.nbytes) + (about.nbytes_full ? ` of ${nbytes(about.nbytes_full)} when full` : ""));
  if (about.settings && !hasNone(about)) add("clips", `history_len ${told(about.settings.history_len)}, frameskip ${told(about.settings.frameskip)}`);
  if (about.settings) add("durability", told(about.settings.durability));
  const picture = about.tail !== undefined ? el("canvas", { class: "ring", role: "img", "aria-label": "The ring" }) : null;
  const legend = picture ? el("p", { class: "legend quiet" }, [["used", "stored"], ["good", "just written"], ["bad", "just evicted"], ["free", "free"]].map(([name, text]) => el("span", {}, el("i", { class: name }), text))) : "";
  main.append(el("dl", { class: "facts" }, Object.values(facts).map((f) => f.div)), picture || "", legend);
  const pace = speed(), commits = speed();
  return (state, before) => {
    if (facts.episodes) facts.episodes.dd.textContent = count(state.episodes);
    facts[steps].dd.textContent = count(state.steps);
    if (state.max_steps) facts.fill.dd.textContent = fillOf(state);
    if (state.head === undefined) return;
    if (state.writer && JSON.stringify(state.writer) !== JSON.stringify(about.writer)) facts.writer?.dd.replaceChildren(who((about.writer = state.writer)));
    facts.written.dd.textContent = count(state.head);
    facts.commits.dd.textContent = count(state.commits);
    facts["redraws of this reader"].dd.textContent = count(state.redraws);
    facts["steps per second"].dd.textContent = pace(state.head, before);
    facts["commits per second"].dd.textContent = commits(state.commits, before);
    drawRing(picture, state, before);
  };
}

// What is said of a fleet, in total and ring by ring; returns what draws a new state.
function fleet(about) {
  const facts = el("dl", { class: "facts" }), rows = el("tbody", {}), kept = el("div", {}), wrong = el("div", {});
  const single = about.episodes === null, steps = single ? "transitions" : "steps";
  const titles = ["ring", ...(single ? [] : ["episodes"]), steps, "fill", "written", "steps per second", "writer", "last commit", "policy step"];
  let known = "", paced = "";
  const total = speed(), each = new Map();
  const rate = (ring, before) => each.get(ring.name)?.(ring.written, before) ?? (each.set(ring.name, speed()), each.get(ring.name)(ring.written, null));
  const behind = (ring, state) => (ring.policy_step === null ? "–" : ring.policy_step < state.policy_step ? `${count(ring.policy_step)}, ${count(state.policy_step - ring.policy_step)} behind` : count(ring.policy_step));
  const made = new Map(); // rows stay the same elements: one of their links may have the focus
  const row = (ring, state, before) => {
    const named = `${ring.key} ${ring.name}`;
    if (!made.has(named)) made.set(named, el("tr", {}, el("td", {}, ring.key ? el("a", { href: link(["p", ring.key]) }, ring.name) : ring.name), titles.slice(1).map(() => el("td", {}))));
    const cells = ring.problem ? [el("span", { class: "bad" }, "not read"), ...titles.slice(2).fill("–")] : [...(single ? [] : [count(ring.episodes)]), count(ring.steps), percent(ring), count(ring.written), rate(ring, before), alive(ring.writer, "") || "none", ago(ring.idle_s), behind(ring, state)];
    cells.forEach((cell, i) => made.get(named).cells[i + 1].replaceChildren(cell));
    return made.get(named);
  };
  main.append(facts, kept, el("h2", {}, "Rings"), wrong,
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rings" }, el("table", {}, el("thead", {}, el("tr", {}, titles.map((t) => el("th", {}, t)))), rows)));
  return (state, before) => {
    const bad = state.shards.filter((ring) => ring.problem);
    const stale = state.staleness === null ? "not known: no policy_step" : state.staleness ? `${count(state.staleness, "step")} between rings` : `none, all at ${count(state.policy_step)}`;
    facts.replaceChildren(...[["rings", count(state.shards.length) + (bad.length ? `, ${count(bad.length)} not read` : "")], ...(single ? [] : [["episodes", count(state.episodes)]]), [steps, count(state.steps)], ["fill", fillOf(state)], ["written", count(state.written)], ["steps per second", total(state.written, before)], ["writers alive", count(state.writers)], ["redraws of these readers", count(state.redraws)], ["on disk", nbytes(about.nbytes)], ["policy staleness", stale]].map(([n, v]) => fact(n, v).div));
    const said = bad.map((ring) => `${ring.name}: ${ring.problem}`);
    if (said.join() !== known) known = said.join(), wrong.replaceChildren(...said.map(note)); // an alert is read aloud: once
    const pace = JSON.stringify(state.pace);
    if (pace !== paced) paced = pace, kept.replaceChildren(paceOf(state.pace));
    const now = state.shards.map((ring) => row(ring, state, before));
    if (now.length !== rows.children.length || now.some((one, i) => one !== rows.children[i])) rows.replaceChildren(...now);
  };
}

// How far collectors or learners are ahead, between the two limits at which they wait.
function paceOf(pace) {
  if (!pace) return "";
  if (pace.problem) return note(`Pace: ${pace.problem}`);
  const early = pace.inserted < pace.min_steps, slack = count(Math.round(pace.slack)), mark = el("i", {});
  const said = early ? `not yet: ${count(pace.min_steps)} steps come in first` : `${pace.ahead >= 0 ? "collectors" : "learners"}, by ${count(Math.round(Math.abs(pace.ahead)))} draws`;
  mark.style.left = `${Math.max(0, Math.min(100, 50 + (50 * pace.ahead) / pace.slack))}%`;
  const facts = [["draws of each step", `${pace.ratio === null ? "–" : pace.ratio.toFixed(2)} of ${number(pace.samples_per_insert)}`], ["steps drawn", count(pace.drawn)], ["steps that came in", count(pace.inserted)], ["learner", alive({ alive: pace.learner }, "") || "none"], ["ahead", said]];
  return el("div", {}, el("h2", {}, "Pace"), el("dl", { class: "facts" }, facts.map(([n, v]) => fact(n, v).div)),
    early ? null : [el("div", { class: "pace", role: "img", "aria-label": `ahead: ${said}, of ${slack}` }, mark), el("p", { class: "ends quiet" }, el("span", {}, `learners wait at ${slack}`), el("span", {}, `collectors wait at ${slack}`))]);
}

function drawRing(canvas, state, before) {
  const wide = canvas.clientWidth || 600, high = 46, scale = devicePixelRatio || 1;
  canvas.width = wide * scale;
  canvas.height = high * scale;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  pen.scale(scale, scale);
  const colour = (name) => style.getPropertyValue(name).trim();
  pen.fillStyle = colour("--free");
  pen.fillRect(0, 8, wide, 18);
  const rows = Math.max(1, state.max_steps), at = (p) => ((p % rows) / rows) * wide;
  const span = (from, to, fill) => {
    pen.fillStyle = fill;
    if (to - from >= rows) return pen.fillRect(0, 8, wide, 18);
    if (to <= from) return;
    const a = at(from), b = at(to);
    if (b > a) pen.fillRect(a, 8, b - a, 18);
    else pen.fillRect(a, 8, wide - a, 18), pen.fillRect(0, 8, b, 18);
  };
  span(state.tail, state.head, colour("--used"));
  if (before) span(before.tail, Math.min(state.tail, before.head), colour("--bad")), span(Math.max(before.head, state.tail), state.head, colour("--good"));
  pen.fillStyle = colour("--text");
  pen.font = "11px system-ui";
  const marks = [["tail", at(state.tail)], ["head", at(state.head)]].sort((a, b) => a[1] - b[1]);
  let from = 0; // where the next word may begin: they stand beside each other, not over
  for (const [i, [name, x]] of marks.entries()) {
    pen.fillRect(Math.min(wide - 2, x), 4, 2, 26);
    from = Math.max(from, Math.min(x, wide - 32 * (marks.length - i)));
    pen.fillText(name, from, 42);
    from += 32;
  }
  canvas.setAttribute("aria-label", `The ring: ${count(state.steps)} of ${count(state.max_steps)} steps are stored, positions ${count(state.tail)} to ${count(state.head)}`);
}

function columnsOf(about) {
  if (!about.columns?.length) return main.append(el("p", { class: "quiet" }, "No columns before the first episode."));
  const rows = about.columns.map((c) => el("tr", {}, el("td", {}, c.name), el("td", {}, c.dtype), el("td", {}, c.shape.join(" × ") || "–"), el("td", {}, c.range ? `${number(c.range[0])} to ${number(c.range[1])}` : "–"), el("td", {}, c.storage || "–"), el("td", {}, c.reason || c.kind)));
  main.append(el("h2", {}, "Columns"), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Columns" }, el("table", {}, el("thead", {}, el("tr", {}, ["column", "dtype", "shape", "range of the newest steps", "storage", "drawn as"].map((t) => el("th", {}, t)))), el("tbody", {}, rows))));
}

window.addEventListener("hashchange", show);
show();
