// A document with as much of the DOM as the page needs, for Node: the page's own script runs in it against a server.
// Usage: node page_dom.js APP.JS INDEX.HTML SERVER. Prints one JSON object with what the page showed.
"use strict";
const fs = require("fs");
const [, , script, html, server] = process.argv;

class Element {
  constructor(tag = "div") {
    Object.assign(this, { tag, children: [], dataset: {}, attributes: {}, listeners: {}, value: "", hidden: false });
    this.classes = new Set();
    this.style = { setProperty() {} };
    this.own = "";
    const classes = this.classes;
    this.classList = {
      add: (name) => classes.add(name),
      contains: (name) => classes.has(name),
      toggle: (name, on) => (on ? classes.add(name) : classes.delete(name)),
    };
  }
  get className() { return [...this.classes].join(" "); }
  set className(text) { this.classes.clear(); text.split(/\s+/).filter(Boolean).forEach((name) => this.classes.add(name)); }
  get textContent() { return this.own + this.children.map((child) => child.textContent).join(""); }
  set textContent(text) { this.children = []; this.own = text; }
  get options() { return this.children; }
  append(...some) { this.children.push(...some); }
  replaceChildren(...some) { this.own = ""; this.children = some; }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener(name, listener) { (this.listeners[name] ??= []).push(listener); }
  closest(selector) { return selector === "label" ? { querySelector: () => new Element() } : null; }
  querySelector(selector) { return this.querySelectorAll(selector)[0] ?? null; }
  querySelectorAll(selector) { return this.children.filter((child) => child.classes.has(selector.slice(1))); }
  fire(name, event = {}) { for (const listener of this.listeners[name] ?? []) listener({ target: this, preventDefault() {}, ...event }); }
  focus() {}
}

const ids = {};
for (const [, tag, rest] of fs.readFileSync(html, "utf8").matchAll(/<(\w+)([^>]*\sid="[^>]*)>/g)) {
  const element = (ids[rest.match(/\sid="([^"]+)"/)[1]] = new Element(tag));
  element.value = rest.match(/value="([^"]*)"/)?.[1] ?? "";
  element.hidden = /\shidden/.test(rest);
}
ids.other.value = "-";
let pointed = null;
const tool = { value: "rewrite" };
const window_ = new Element();
global.window = window_;
global.document = Object.assign(new Element(), {
  getElementById: (id) => ids[id] ?? (() => { throw new Error(`no element ${id}`); })(),
  createElement: (tag) => new Element(tag),
  querySelector: () => tool,
  querySelectorAll: () => [],
  elementFromPoint: () => ({ closest: () => pointed }),
});
global.Option = function (text, value) { return Object.assign(new Element("option"), { own: text, value }); };
global.location = { hash: "", origin: server, pathname: "/", href: "" };
global.history = { replaceState: (a, b, href) => { location.href = href; location.hash = href.slice(href.indexOf("#")); } };
global.sessionStorage = { getItem: () => null, setItem() {} };
const plain = global.fetch;
global.fetch = (path, options) => plain(server + path, options);

const idle = async () => {
  for (let i = 0; i < 600; i++) {
    await new Promise((resolve) => setTimeout(resolve, 50));
    if (ids.halt.hidden && i > 3) return;
  }
  throw new Error("the page did not come to rest");
};
const words = () => ids.text.children;
const click = async (number, last = number) => {
  pointed = words()[number];
  ids.text.fire("pointerdown", { button: 0 });
  pointed = words()[last];
  window_.fire("pointermove");
  window_.fire("pointerup");
  await idle();
};

(async () => {
  (0, eval)(fs.readFileSync(script, "utf8"));
  const seen = {}, show = (name) => { seen[name] = { text: ids.text.textContent, error: ids.error.hidden ? null : ids.error.textContent }; };
  const note = (name) => { show(name); seen[name].status = ids.status.textContent; };
  await idle();
  seen.model = ids.model.textContent;
  ids.source.value = "It was a dark night, and";
  ids.count.value = "16";
  ids.form.fire("submit");
  await idle();
  note("sample");
  seen.words = words().map((word) => word.textContent);
  seen.colours = [...new Set(words().flatMap((word) => word.children.map((token) => token.className.trim())))];
  await click(2, 3);
  note("rewritten");
  ids.undo.fire("click");
  note("undone");
  tool.value = "lock";
  await click(1);
  tool.value = "rewrite";
  await click(1);
  note("locked");
  ids.text.fire("keydown", { key: "Enter", target: words()[4] });
  await idle();
  note("by_key");
  ids.source.value = "She ____ the letter.";
  ids.seed.value = "5";
  ids.form.fire("submit");
  await idle();
  note("filled");
  ids.link.fire("click");
  seen.link = location.href;
  ids.other.value = "left_to_right";
  ids.form.fire("submit");
  await idle();
  seen.compared = { text: ids.text2.textContent, status: ids.status2.textContent };
  ids.other.value = "-";
  ids.temperature.value = "-1";
  ids.form.fire("submit");
  await idle();
  note("refused");
  console.log(JSON.stringify(seen));
  process.exit(0);
})().catch((error) => { console.error(error); process.exit(1); });
