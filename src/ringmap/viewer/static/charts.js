// Lines with uPlot; small pictures of numbers without it.
import { colours, count, el, number } from "./lib.js";

const style = () => getComputedStyle(document.documentElement);
const colour = (name) => style().getPropertyValue(name).trim();

function canvasOf(label, high) {
  return el("canvas", { role: "img", "aria-label": label, class: "ring", height: high });
}

function pen(canvas, high) {
  const wide = canvas.clientWidth || 400, scale = devicePixelRatio || 1;
  canvas.width = wide * scale;
  canvas.height = high * scale;
  const made = canvas.getContext("2d");
  made.scale(scale, scale);
  return [made, wide];
}

export function histogram(name, values) {
  const canvas = canvasOf(`${name}: histogram`, 46);
  requestAnimationFrame(() => {
    const [p, wide] = pen(canvas, 46), most = Math.max(1, ...values.counts), step = wide / values.counts.length;
    p.fillStyle = colour("--used");
    values.counts.forEach((n, i) => n && p.fillRect(i * step, 46 - Math.max(1, (44 * n) / most), Math.max(1, step - 1), Math.max(1, (44 * n) / most)));
  });
  return el("figure", {}, canvas, el("figcaption", {}, `${name}: ${number(values.least)} to ${number(values.most)}, mean ${number(values.mean)}`));
}

export function trend(name, values) {
  const canvas = canvasOf(`${name} of episodes, oldest first`, 46);
  requestAnimationFrame(() => {
    const [p, wide] = pen(canvas, 46), range = values.most - values.least || 1;
    p.strokeStyle = colour("--used");
    p.lineWidth = 1.5;
    p.beginPath();
    let on = false; // a gap where nothing is known
    values.means.forEach((v, i) => {
      if (v === null) return (on = false);
      p[on ? "lineTo" : "moveTo"](values.means.length > 1 ? (i / (values.means.length - 1)) * wide : wide / 2, 44 - (42 * (v - values.least)) / range);
      on = true;
    });
    p.stroke();
  });
  return el("figure", {}, canvas, el("figcaption", {}, `${name}, oldest to newest`));
}

export function unpack(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  let at = 4 + size;
  const take = () => {
    const values = new Float64Array(buffer, at, head.points);
    at += 8 * head.points;
    return values;
  };
  head.steps = take();
  for (const column of head.columns) column.values = Array.from({ length: column.lines }, take);
  return head;
}

// Between two ticks of an axis of steps.
const WHOLE = Array.from({ length: 30 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));

const gaps = (values) => Array.from(values, (v) => (Number.isFinite(v) ? v : null));

// The range of an axis. Floats near 6e18 lie 1024 apart: one that is too narrow for them has no ticks, and stops uPlot.
function room(a, b) {
  if (a === null) return [0, 1];
  const least = Math.max(Math.abs(a), Math.abs(b)) * 1e-9;
  const by = b - a > least ? (b - a) * 0.05 : Math.max(a === b ? 1 : 0, least);
  return [a - by, b + by];
}

// One chart: lines over steps. `lines`: {label, values}[]; calls `moved(step)` when it is clicked, `zoomed(low, high)` when dragged.
export class Chart {
  constructor(title, labels, { moved, zoomed }) {
    this.labels = labels;
    this.zoomed = zoomed;
    this.read = el("div", { class: "read", "aria-live": "off" });
    this.box = el("div", {});
    const keys = labels.length > 1 ? el("div", { class: "keys", role: "group", "aria-label": `Lines of ${title}` }, labels.map((label, i) => {
      const button = el("button", { type: "button", "aria-pressed": "true", onclick: () => {
        const on = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(on));
        this.plot?.setSeries(i + 1, { show: on });
      } }, label);
      button.style.borderLeftColor = colours[i % colours.length];
      return button;
    })) : null;
    this.root = el("section", { class: "chart", "aria-label": title }, el("h3", {}, title), this.read, this.box, keys);
    this.box.addEventListener("click", () => {
      if (this.plot && this.plot.cursor.idx !== null && this.plot.cursor.idx !== undefined) moved(this.plot.data[0][this.plot.cursor.idx]);
    });
    this.box.addEventListener("wheel", (event) => {
      if (!this.plot || !event.ctrlKey && !event.altKey && Math.abs(event.deltaX) > Math.abs(event.deltaY)) return;
      event.preventDefault();
      const { min, max } = this.plot.scales.x, by = event.deltaY < 0 ? 0.75 : 1.33;
      const mid = this.plot.posToVal(event.offsetX, "x");
      zoomed(mid - (mid - min) * by, mid + (max - mid) * by);
    }, { passive: false });
    this.box.addEventListener("dblclick", () => zoomed(null, null));
    this.step = 0;
  }

  set(steps, lines, low, high) {
    const data = [Array.from(steps), ...lines.map(gaps)];
    if (!this.plot) {
      const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 0.5 }, ticks: { stroke: colour("--line") } };
      this.plot = new window.uPlot({
        width: this.box.clientWidth || 400, height: 150, legend: { show: false },
        cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "steps" }, points: { show: false } },
        scales: { x: { time: false, range: () => this.range || [low, high] }, y: { range: (_, a, b) => room(a, b) } },
        axes: [{ ...axis, size: 26, incrs: WHOLE }, { ...axis, size: (_, labels) => Math.max(54, ...(labels || []).map((v) => 20 + 7 * v.length)), values: (_, v) => v.map(number) }],
        series: [{}, ...this.labels.map((label, i) => ({ label, stroke: colours[i % colours.length], width: 1.4, points: { show: steps.length < 2 } }))],
        hooks: {
          setCursor: [(u) => this.say(u.cursor.idx ?? this.idx)], // away from the chart: the step of all
          setSelect: [(u) => {
            if (u.select.width > 4) this.zoomed(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
            u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          }],
          draw: [(u) => {
            const x = u.valToPos(this.step, "x", true);
            if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
            u.ctx.fillStyle = colour("--bad");
            u.ctx.fillRect(x - 1, u.bbox.top, 2, u.bbox.height);
          }],
        },
      }, data, this.box);
    }
    this.range = [low, high];
    this.plot.setData(data, false);
    this.plot.setScale("x", { min: low, max: high });
    this.at(this.step);
  }

  at(step) {
    this.step = step;
    if (!this.plot) return;
    this.plot.redraw(false, false);
    const steps = this.plot.data[0];
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (steps[middle] <= step) low = middle;
      else high = middle - 1;
    }
    this.idx = low;
    this.say(low);
  }

  say(idx) {
    if (!this.plot || idx === null || idx === undefined) return;
    const d = this.plot.data;
    this.read.textContent = `step ${count(d[0][idx])}: ` + this.labels.slice(0, 8).map((label, i) => (this.labels.length > 1 ? `${label}: ` : "") + number(d[i + 1][idx])).join(", ");
  }

  resize() {
    if (this.plot && this.box.clientWidth) this.plot.setSize({ width: this.box.clientWidth, height: 150 });
  }
}
