// As much of a document as the pages' modules need: elements in a tree, listeners, frames that are drawn at once.

class Element {
  constructor(name) {
    Object.assign(this, { name, children: [], attributes: {}, style: {}, listeners: {}, parent: null, text: "", clientHeight: 340, scrollTop: 0, disabled: false, hidden: false });
    const names = new Set();
    this.classList = { toggle: (one, on) => (on ? names.add(one) : names.delete(one)) };
  }
  get textContent() {
    return this.text + this.children.map((c) => (c instanceof Element ? c.textContent : String(c))).join("");
  }
  set textContent(text) {
    this.children = [];
    this.text = text;
  }
  append(...children) {
    for (const child of children) {
      if (child instanceof Element) child.remove(), (child.parent = this);
      this.children.push(child);
    }
  }
  replaceChildren(...children) {
    this.children = [];
    this.append(...children);
  }
  remove() {
    if (this.parent) this.parent.children = this.parent.children.filter((c) => c !== this);
    this.parent = null;
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
    if (name === "id") this.id = value;
  }
  removeAttribute(name) {
    delete this.attributes[name];
  }
  addEventListener(name, call) {
    (this.listeners[name] ??= []).push(call);
  }
  fire(name, given = {}) {
    for (const call of this.listeners[name] ?? []) call({ target: this, preventDefault() {}, ...given });
  }
  *all() {
    yield this;
    for (const child of this.children) if (child instanceof Element) yield* child.all();
  }
}

export function begin() {
  globalThis.document = { createElement: (name) => new Element(name) };
  globalThis.requestAnimationFrame = (call) => (setTimeout(call, 0), 1);
  globalThis.history = { replaceState() {} };
  globalThis.location = { hash: "" };
  globalThis.ResizeObserver = class {
    observe() {}
    disconnect() {}
  };
}

// Waits until nothing is fetched and no timer of the page is left: a condition, not a time.
export async function until(wanted) {
  for (let i = 0; i < 300; i++) {
    if (wanted()) return;
    await new Promise((done) => setTimeout(done, 1));
  }
  throw new Error("it never came");
}
