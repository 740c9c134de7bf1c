// A picture column as a film: a frame that is not loaded comes alone and at once, then its block, and the next block ahead of time.
import { ask, el } from "./lib.js";

const BLOCK = 32, BLOCK_NBYTES = 16e6, KEPT_NBYTES = 200e6;
const EXACT_PIXELS = 160 * 160; // the server sends larger pictures as JPEG, unless it is asked for exact ones

export class Film {
  constructor(page, key, id, column, length, name) {
    Object.assign(this, { page, key, id, column, length, exact: false, wanted: 0 });
    const [h, w] = column.shape.length === 2 ? column.shape : [1, 3].includes(column.shape[0]) && ![1, 3, 4].includes(column.shape[2]) ? column.shape.slice(1) : column.shape;
    this.size = Math.max(1, Math.min(BLOCK, Math.floor(BLOCK_NBYTES / (4 * h * w)))); // frames of a block
    this.most = Math.max(3, Math.floor(KEPT_NBYTES / (4 * h * w * this.size))); // blocks
    const by = Math.max(1, Math.floor(256 / Math.max(h, w)));
    this.canvas = el("canvas", { width: w, height: h, role: "img", "aria-label": `${column.name}` });
    this.canvas.style.width = `${Math.min(640, w * by)}px`;
    this.said = el("span", {});
    const exact = h * w > EXACT_PIXELS ? el("button", { type: "button", class: "small", "aria-pressed": "false", title: "Show every pixel as it is stored; larger, and slower", onclick: () => {
      this.exact = !this.exact;
      exact.setAttribute("aria-pressed", String(this.exact));
      this.forget();
      this.at(this.wanted);
    } }, "exact") : null;
    this.root = el("figure", {}, this.canvas, el("figcaption", {}, name || column.name, " ", exact, " ", this.said));
    this.forget();
    page.later.push(() => this.forget());
  }

  forget() {
    for (const frames of this.ready?.values() ?? []) frames.forEach((frame) => frame.close());
    this.ready = new Map(); // block -> frames
    this.asked = new Map(); // block -> promise
    this.shown = null;
  }

  async fetch(start, n) {
    const reply = await ask("frames", { p: this.key, e: this.id, c: this.column.name, start, n, exact: this.exact ? 1 : null }, { signal: this.page.signal });
    const buffer = await reply.arrayBuffer(), view = new DataView(buffer), count = view.getUint32(4, true), frames = [];
    let at = 8 + 4 * count;
    for (let i = 0; i < count; i++) {
      const size = view.getUint32(8 + 4 * i, true);
      frames.push(createImageBitmap(new Blob([new Uint8Array(buffer, at, size)])));
      at += size;
    }
    return Promise.all(frames);
  }

  // Loads a block, once.
  block(number) {
    if (this.asked.has(number)) return;
    const asked = this.asked, ready = this.ready;
    asked.set(number, this.fetch(number * this.size, this.size).then((frames) => {
      if (ready !== this.ready) return frames.forEach((frame) => frame.close());
      ready.set(number, frames);
      this.show();
      while (ready.size > this.most) {
        const far = [...ready.keys()].sort((a, b) => Math.abs(b - number) - Math.abs(a - number))[0];
        ready.get(far).forEach((frame) => frame.close());
        ready.delete(far);
        asked.delete(far);
      }
    }, (error) => {
      asked.delete(number);
      this.wrong(error);
    }));
  }

  wrong(error) {
    if (error.name === "AbortError") return;
    this.said.textContent = `(${error.message})`;
    this.failed?.(error);
  }

  // Draws the wanted frame if it is loaded; tells whether it is drawn.
  show() {
    if (this.shown === this.wanted) return true;
    const frame = this.ready.get(Math.floor(this.wanted / this.size))?.[this.wanted % this.size];
    if (!frame) return false;
    this.draw(frame);
    this.shown = this.wanted;
    return true;
  }

  // Fetches the wanted frame alone. One at a time: while a slider is dragged, the next is the one where it is by then.
  async jump() {
    while (this.wanted < this.length && !this.show()) {
      const step = this.wanted, ready = this.ready;
      const [frame] = await this.fetch(step, 1);
      if (ready === this.ready && this.wanted < this.length && !this.show()) {
        this.draw(frame);
        this.shown = step;
      }
      frame.close();
    }
  }

  async at(step) {
    this.wanted = step;
    if (step >= this.length) { // of several episodes, a shorter one
      this.shown = null;
      return this.draw(null);
    }
    if (!this.show()) {
      if (this.jumping) return;
      this.jumping = true;
      try {
        await this.jump();
      } catch (error) {
        this.shown = null;
        this.draw(null); // no picture, rather than that of another step
        return this.wrong(error);
      } finally {
        this.jumping = false;
      }
    }
    const number = Math.floor(this.wanted / this.size);
    this.block(number);
    if (this.wanted % this.size >= this.size >> 1 && (number + 1) * this.size < this.length) this.block(number + 1);
  }

  draw(frame) {
    const pen = this.canvas.getContext("2d");
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    if (frame) pen.drawImage(frame, 0, 0, this.canvas.width, this.canvas.height);
  }
}
