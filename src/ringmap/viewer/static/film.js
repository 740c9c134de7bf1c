// A picture column as a film: blocks of frames are asked for ahead, and drawn on a canvas.
import { ask, el } from "./lib.js";

const BLOCK = 32, KEPT = 12;

export class Film {
  constructor(page, key, id, column, length, name) {
    Object.assign(this, { page, key, id, column, length });
    this.blocks = new Map();
    this.wanted = 0;
    const [h, w] = column.shape.length === 2 ? column.shape : [1, 3].includes(column.shape[0]) && ![1, 3, 4].includes(column.shape[2]) ? column.shape.slice(1) : column.shape;
    const by = Math.max(1, Math.floor(256 / Math.max(h, w)));
    this.canvas = el("canvas", { width: w, height: h, role: "img", "aria-label": `${column.name}` });
    this.canvas.style.width = `${Math.min(640, w * by)}px`;
    this.said = el("span", {});
    this.root = el("figure", {}, this.canvas, el("figcaption", {}, name || column.name, " ", this.said));
  }

  block(number) {
    let found = this.blocks.get(number);
    if (!found) {
      found = this.load(number);
      this.blocks.set(number, found);
      found.catch((error) => {
        this.blocks.delete(number);
        if (error.name !== "AbortError") this.said.textContent = `(${error.message})`, this.failed?.(error);
      });
      if (this.blocks.size > KEPT) {
        const far = [...this.blocks.keys()].sort((a, b) => Math.abs(b - number) - Math.abs(a - number))[0];
        this.blocks.get(far).then((frames) => frames.forEach((f) => f.close()), () => {});
        this.blocks.delete(far);
      }
    }
    return found;
  }

  async load(number) {
    const buffer = await (await ask("frames", { p: this.key, e: this.id, c: this.column.name, start: number * BLOCK, n: BLOCK }, { signal: this.page.signal })).arrayBuffer();
    const view = new DataView(buffer), count = view.getUint32(4, true), frames = [];
    let at = 8 + 4 * count;
    for (let i = 0; i < count; i++) {
      const size = view.getUint32(8 + 4 * i, true);
      frames.push(createImageBitmap(new Blob([new Uint8Array(buffer, at, size)])));
      at += size;
    }
    return Promise.all(frames);
  }

  async at(step) {
    this.wanted = step;
    if (step >= this.length) return this.draw(null);
    const number = Math.floor(step / BLOCK);
    let frames;
    try {
      frames = await this.block(number);
    } catch {
      return;
    }
    if (this.wanted !== step) return;
    let frame = frames[step % BLOCK];
    if (!frame && frames.length) { // the reply was cut to its bound: this one alone
      try {
        const reply = await ask("frames", { p: this.key, e: this.id, c: this.column.name, start: step, n: 1 }, { signal: this.page.signal });
        const buffer = await reply.arrayBuffer();
        frame = await createImageBitmap(new Blob([new Uint8Array(buffer, 12)]));
      } catch {
        return;
      }
    }
    if (this.wanted === step && frame) this.draw(frame);
    if (step % BLOCK > BLOCK / 2 && (number + 1) * BLOCK < this.length) this.block(number + 1).catch(() => {});
  }

  draw(frame) {
    const pen = this.canvas.getContext("2d");
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    if (frame) pen.drawImage(frame, 0, 0, this.canvas.width, this.canvas.height);
  }
}
