// The rows of a table that are held, by blocks: a block is asked for once, and again after it was dropped.

export class Blocks {
  constructor(size, most) {
    Object.assign(this, { size, most, held: new Map(), asked: new Set() });
  }

  get(i) {
    return this.held.get(Math.floor(i / this.size))?.[i % this.size];
  }

  // Tells whether a block is to be fetched now, and notes that it is.
  ask(block) {
    return !this.asked.has(block) && !!this.asked.add(block);
  }

  // It did not come: it may be asked for again.
  failed(block) {
    this.asked.delete(block);
  }

  // Every block may be asked for again; what is held is shown until then.
  renew() {
    this.asked = new Set();
  }

  // Holds a block, and drops those that came first; alone, it replaces all.
  put(block, rows, alone) {
    if (alone) this.held = new Map();
    this.held.delete(block);
    this.held.set(block, rows);
    while (this.held.size > this.most) {
      const [old] = this.held.keys();
      this.held.delete(old);
      this.asked.delete(old);
    }
  }
}
