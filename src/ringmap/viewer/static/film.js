// A picture column as a film: a frame that is not loaded comes alone and at once, then its block, and the next block ahead of time.
import { ask, el } from "./lib.js";

const BLOCK = 32, BLOCK_NBYTES = 16e6, KEPT_NBYTES = 200e6;
const REST_MS = 150; // after a jump, before its block is asked for: another jump may follow
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
    for (const asked of this.asked?.values() ?? []) asked.abort();
    clearTimeout(this.resting);
    this.resting = null;
    this.ready = new Map(); // block -> frames
    this.asked = new Map(); // block -> what ends its request
    this.shown = null;
  }

  async fetch(start, n, signal) {
    const reply = await ask("frames", { p: this.key, e: this.id, c: this.column.name, start, n, exact: this.exact ? 1 : null }, { signal });
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
    if (this.ready.has(number) || this.asked.has(number)) return;
    const asked = this.asked, ready = this.ready, ending = new AbortController();
    asked.set(number, ending);
    this.fetch(number * this.size, this.size, ending.signal).then((frames) => {
      asked.delete(number);
      if (ready !== this.ready) return frames.forEach((frame) => frame.close());
      ready.set(number, frames);
      this.show();
      while (ready.size > this.most) {
        const far = [...ready.keys()].sort((a, b) => Math.abs(b - number) - Math.abs(a - number))[0];
        ready.get(far).forEach((frame) => frame.close());
        ready.delete(far);
      }
    }, (error) => {
      asked.delete(number);
      this.wrong(error);
    });
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
      const step = this.wanted, ready = this.ready, number = Math.floor(step / this.size);
      for (const [other, ending] of this.asked) if (Math.abs(other - number) > 1) ending.abort();
      const [frame] = await this.fetch(step, 1, this.page.signal);
      if (ready === this.ready && this.wanted < this.length && !this.show()) {
        this.draw(frame);
        this.shown = step;
      }
      frame.close();
    }
  }

  async at(step) {
    this.wanted = step;
    this.shown = null; // it is drawn again, even if it is what is seen
    if (step >= this.length) return this.draw(null); // of several episodes, a shorter one
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
    if (this.ready.has(Math.floor(this.wanted / this.size))) this.ahead();
    else this.resting ??= setTimeout(() => { this.resting = null; this.ahead(); }, REST_MS);
  }

  // Loads the block of the wanted frame, and past its middle the next one.
  ahead() {
    const number = Math.floor(this.wanted / this.size);
    if (this.wanted < this.length) this.block(number);
    if (this.wanted % this.size >= this.size >> 1 && (number + 1) * this.size < this.length) this.block(number + 1);
  }

  draw(frame) {
    const pen = this.canvas.getContext("2d");
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    if (frame) pen.drawImage(frame, 0, 0, this.canvas.width, this.canvas.height);
  }
}
