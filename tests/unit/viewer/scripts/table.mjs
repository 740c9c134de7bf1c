// A table of 10,000 episodes is scrolled through and back; a server that fails once; an eviction. Prints what is seen as JSON.
import { begin, until } from "./document.mjs";

begin();
const TOTAL = 10_000, asked = [], said = { total: TOTAL, fail: false, shift: 0 };
globalThis.fetch = async (address) => {
  const query = new URLSearchParams(address.split("?")[1]), from = Number(query.get("from")), n = Number(query.get("n"));
  asked.push(from / n);
  if (said.fail) return (said.fail = false), { ok: false, status: 500, json: async () => ({ error: "once" }) };
  const rows = Array.from({ length: Math.max(0, Math.min(n, said.total - from)) }, (_, i) => ({
    id: from + i + said.shift, p: "key", episode: from + i + said.shift, length: 5, known: true, return: 1, ended: "", flags: [], note: "", data: {},
  }));
  return { ok: true, json: async () => ({ rows, names: [], matching: said.total, total: said.total, indexed: said.total, marked: 0 }) };
};

const { episodeTable } = await import(new URL("table.js", process.argv[2]));
const page = { signal: new AbortController().signal, later: [] };
const table = episodeTable(page, "key", new URLSearchParams("desc=0"), { thumbnail: false, shards: false, can_mark: false });
const grid = [...table.root.all()].find((e) => e.className === "grid");
const seen = () => [...grid.all()].filter((e) => e.className === "row").map((e) => Number(e.of.id)).sort((a, b) => a - b);
const at = async (row) => {
  grid.scrollTop = row * 34;
  grid.fire("scroll");
  const first = Math.min(row, said.total - 1) + said.shift;
  await until(() => seen()[0] === first && seen().length >= Math.min(10, said.total - row)).catch(() => {});
  return seen()[0] ?? null;
};

const tops = [];
await until(() => seen().length);
for (let row = 0; row < 6000; row += 50) tops.push(await at(row));
const back = [];
for (const row of [5000, 3000, 1500, 100, 0]) back.push(await at(row));
said.fail = true;
const failed = await at(9000);
const again = await at(8999);
asked.length = 0;
said.shift = 7; // the oldest 7 were evicted
table.changed();
await until(() => seen()[0] >= 7 && asked.length);
const shifted = await at(100);
console.log(JSON.stringify({ tops, back, failed, again, shifted }));
process.exit(0);
