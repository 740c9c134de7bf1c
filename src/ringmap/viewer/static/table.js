// The episodes of a place: only the rows in view are elements, and are asked for as they come into view.
import { Blocks } from "./blocks.js";
import { api, asJson, count, el, link, mark, number, note, toggled, told } from "./lib.js";

const HIGH = 34, BLOCK = 100, MOST_BLOCKS = 30, MOST_PX = 8_000_000;
const OWN = [["ring", "ring"], ["episode", "number"], ["length", "length"], ["return", "return"], ["ended", "ended"], ["flags", "flags"], ["note", "note"]];
const MARKED = "flags != '' or note != ''";

export function episodeTable(page, key, query, about) {
  const pictures = about.thumbnail, own = about.shards ? OWN : OWN.slice(1);
  // An episode's name in the address: of a fleet, with its ring.
  const named = (row) => (row.p === key ? row.id : `${row.p}-${row.id}`);
  let where = query.get("where") || "", sort = query.get("sort") || "episode", desc = (query.get("desc") ?? "1") === "1";
  let total = 0, names = [], turn = 0, at = 0;
  const known = new Blocks(BLOCK, MOST_BLOCKS);
  const chosen = new Set();
  let choosing = false; // a click or a tap then chooses a row, and does not open it
  const filter = el("input", { type: "search", id: "where", value: where, placeholder: "return > 100 and seed < 50", spellcheck: "false", autocomplete: "off" });
  const said = el("span", { class: "quiet", role: "status" });
  const wrong = el("div", {});
  const head = el("div", { class: "head", role: "row" });
  const rows = el("div", { class: "rows", role: "rowgroup" });
  const grid = el("div", { class: "grid", role: "grid", tabindex: "0", "aria-label": "Episodes", "aria-multiselectable": "true" }, el("div", { role: "rowgroup", class: "head" }, head), rows);
  const compare = el("button", { type: "button", disabled: true, onclick: () => (location.hash = link(["p", key, "compare"], { e: [...chosen].join(",") })) }, "Compare");
  const chooses = el("button", { type: "button", "aria-pressed": "false", onclick: () => chooses.setAttribute("aria-pressed", String((choosing = !choosing))) }, "Choose");
  const marked = el("button", { type: "button", hidden: true, "aria-pressed": "false", onclick: () => { where = filter.value = where === MARKED ? "" : MARKED; restart(true); } });
  const form = el("form", { class: "bar", onsubmit: (event) => { event.preventDefault(); where = filter.value; restart(true); } },
    el("label", { for: "where" }, "Filter"), filter, el("button", {}, "Apply"), marked, chooses, compare, said);
  const root = el("div", {}, form, wrong, grid, el("p", { class: "quiet" }, "Enter opens an episode. Choose, shift-click or x chooses several to compare." + (about.can_mark ? " The letter b gives the row in the frame the flag bad, or takes it away." : "")));
  const api_ = { root, indexed: () => {}, changed, moved };

  function moved(q) {
    const now = [q.get("where") || "", q.get("sort") || "episode", (q.get("desc") ?? "1") === "1"];
    if (now[0] === where && now[1] === sort && now[2] === desc) return;
    [where, sort, desc] = now;
    filter.value = where;
    restart(false);
  }

  function restart(address) {
    if (address) history.replaceState(null, "", link(["p", key], { where, sort: sort === "episode" ? null : sort, desc: desc ? null : "0" }));
    at = 0;
    grid.scrollTop = 0;
    headers();
    changed();
  }

  function headers() {
    const columns = [...own, ...names.map((n) => [n, n])];
    head.replaceChildren(...(pictures ? [el("div", { class: "cell pic", role: "columnheader" }, el("span", { class: "sr" }, "picture"))] : []), ...columns.map(([name, shown]) =>
      el("div", { class: own.some(([n]) => n === name) ? "cell" : "cell data", role: "columnheader", "aria-sort": sort === name ? (desc ? "descending" : "ascending") : "none" },
        el("button", { type: "button", title: `Sort by ${shown}`, onclick: () => { if (sort === name) desc = !desc; else [sort, desc] = [name, true]; restart(true); } }, shown + (sort === name ? (desc ? " ↓" : " ↑") : "")))));
  }

  let waiting = null;
  function changed() {
    if (waiting) return;
    waiting = setTimeout(async () => {
      waiting = null;
      turn += 1;
      known.renew();
      await fetchBlock(Math.floor(first() / BLOCK), turn, true);
      draw();
    }, 60);
  }

  const scale = () => Math.max(1, (total * HIGH) / MOST_PX); // browsers limit how tall an element is
  const first = () => Math.max(0, Math.min(total - 1, Math.floor((grid.scrollTop * scale()) / HIGH)));

  async function fetchBlock(block, mine, fresh) {
    if (!known.ask(block)) return;
    try {
      const found = await asJson("episodes", { p: key, from: block * BLOCK, n: BLOCK, where, sort, desc: desc ? 1 : 0 }, { signal: page.signal });
      if (mine !== turn) return;
      wrong.replaceChildren();
      known.put(block, found.rows, fresh);
      if (found.names.join() !== names.join() || !head.children.length) names = found.names, headers();
      total = found.matching;
      marked.hidden = !found.marked;
      marked.textContent = `Marked: ${count(found.marked)}`;
      marked.setAttribute("aria-pressed", String(where === MARKED));
      said.textContent = `${count(found.matching)} of ${count(found.total, "episode")}` + (found.indexed < found.total ? `; ${count(found.indexed)} read so far` : "");
      if (found.indexed < found.total) setTimeout(() => !page.signal.aborted && changed(), 700);
      else if (api_.done !== found.total) api_.done = found.total, api_.indexed();
      draw();
    } catch (error) {
      known.failed(block);
      if (error.name === "AbortError") return;
      wrong.replaceChildren(note(error.message));
    }
  }

  const made = new Map();
  function draw() {
    const by = scale(), start = first(), seen = Math.ceil(grid.clientHeight / HIGH) + 2;
    rows.style.height = `${Math.min(MOST_PX, total * HIGH)}px`;
    grid.style.maxHeight = `${Math.max(4, total + 2) * HIGH}px`; // few episodes leave no empty frame
    grid.setAttribute("aria-rowcount", String(total + 1));
    const kept = new Set();
    for (let i = start; i < Math.min(total, start + seen); i++) {
      const row = known.get(i);
      if (!row) {
        fetchBlock(Math.floor(i / BLOCK), turn, false);
        continue;
      }
      kept.add(i);
      let element = made.get(i);
      if (!element || element.of !== row) {
        element?.remove();
        made.set(i, (element = line(row, i)));
        rows.append(element);
      }
      element.style.top = `${by === 1 ? i * HIGH : Math.floor(grid.scrollTop) + (i - start) * HIGH}px`;
      element.classList.toggle("on", chosen.has(named(row)));
      element.classList.toggle("at", i === at);
      element.setAttribute("aria-selected", String(chosen.has(named(row))));
    }
    for (const [i, element] of made) if (!kept.has(i)) element.remove(), made.delete(i);
    if (made.get(at)) grid.setAttribute("aria-activedescendant", made.get(at).id);
    else grid.removeAttribute("aria-activedescendant");
  }

  function line(row, i) {
    const cell = (text, title, kind = "cell") => el("div", { class: kind, role: "gridcell", title: title || null }, text);
    const element = el("div", { class: "row", role: "row", id: `row${i}`, "aria-rowindex": String(i + 2), onmousedown: (event) => event.shiftKey && event.preventDefault() /* selects no text */, onclick: (event) => { at = i; if (choosing || event.shiftKey || event.ctrlKey || event.metaKey) choose(row); else open(row); } },
      pictures ? el("div", { class: "cell pic", role: "gridcell" }, row.damaged ? "" : el("img", { loading: "lazy", alt: "", src: api("thumb", { p: row.p, e: row.id }) })) : null,
      about.shards ? cell(row.ring, row.ring) : null, cell(count(row.episode)), cell(count(row.length)), cell(row.known ? number(row.return) : "…"),
      row.damaged ? el("div", { class: "cell bad", role: "gridcell", title: row.damaged }, "damaged") : cell(row.known ? row.ended || "–" : "…"),
      el("div", { class: "cell flags", role: "gridcell", title: row.flags.join(" ") || null }, row.flags.map((f) => el("span", { class: "tag flag" }, f))), cell(row.note, row.note),
      names.map((n) => cell(told(row.data[n]), told(row.data[n]), "cell data")));
    element.of = row;
    return element;
  }

  const open = (row) => (location.hash = link(["p", row.p, "e", row.id]));
  function choose(row) {
    chosen.has(named(row)) ? chosen.delete(named(row)) : chosen.size < 8 && chosen.add(named(row));
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
    draw();
  }

  async function flag(row) {
    try {
      await mark(row.p, row.id, { flags: toggled(row.flags) });
      changed();
    } catch (error) {
      wrong.replaceChildren(note(error.message));
    }
  }

  let frame = 0;
  grid.addEventListener("scroll", () => { if (!frame) frame = requestAnimationFrame(() => { frame = 0; draw(); }); });
  grid.addEventListener("keydown", (event) => {
    const seen = Math.max(1, Math.floor(grid.clientHeight / HIGH) - 2);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: seen, PageUp: -seen, Home: -total, End: total }[event.key];
    if (by !== undefined) {
      event.preventDefault();
      at = Math.max(0, Math.min(total - 1, at + by));
      const start = first();
      if (at < start || at >= start + seen) grid.scrollTop = (Math.max(0, by < 0 ? at : at - seen + 1) * HIGH) / scale();
      draw();
    } else if (event.key === "Enter" && event.target === grid && known.get(at)) open(known.get(at));
    else if (event.key === "x" && known.get(at)) choose(known.get(at));
    else if (event.key === "b" && about.can_mark && known.get(at)) flag(known.get(at));
  });
  const size = new ResizeObserver(() => draw());
  size.observe(grid);
  page.later.push(() => size.disconnect());
  headers();
  changed();
  return api_;
}
