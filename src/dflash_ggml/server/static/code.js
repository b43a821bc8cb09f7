// A code block that grows: new text is appended as it comes, colours follow at a bounded share of the time.

import hljs from "./vendor/highlight.min.js";
import { copyText, iconButton, make } from "./dom.js";

const LARGEST = 200_000; // characters that are still coloured
const SHARE = 25; // colouring again waits this many times as long as it took

/** Nodes of the highlighter's own tree: text, and spans with its class names. No HTML text is involved. */
function paint(parent, children) {
  for (const child of children) {
    if (typeof child === "string") {
      parent.append(child);
    } else if (child.scope) {
      const [first, ...rest] = child.scope.split(".");
      const span = make("span", { class: [`hljs-${first}`, ...rest.map((name, i) => name + "_".repeat(i + 1))].join(" ") });
      paint(span, child.children);
      parent.append(span);
    } else {
      paint(parent, child.children);
    }
  }
}

export class CodeBlock {
  constructor(language) {
    this.language = language;
    this.known = language && hljs.getLanguage(language) ? language : "";
    this.text = "";
    this.coloured = 0; // characters that have their colours
    this.next = 0; // time from which they may be made again
    this.code = make("code", { class: "hljs" });
    const copy = iconButton("copy", "Copy code", () => copyText(this.text, copy));
    const head = make("figcaption", {}, make("span", { text: language || "text" }), copy);
    this.element = make("figure", { class: "code" }, head, make("pre", { tabindex: "0", "aria-label": "Code" }, this.code));
  }

  update(text, done) {
    if (text !== this.text) {
      if (text.startsWith(this.text)) this.code.append(text.slice(this.text.length));
      else {
        this.code.replaceChildren(text);
        this.coloured = 0;
      }
      this.text = text;
    }
    if (!this.known || this.coloured === text.length || text.length > LARGEST) return;
    const begun = performance.now();
    if (!done && begun < this.next) return;
    const { _emitter: emitter } = hljs.highlight(text, { language: this.known, ignoreIllegals: true });
    const whole = document.createDocumentFragment();
    paint(whole, emitter.rootNode.children);
    this.code.replaceChildren(whole);
    this.coloured = text.length;
    const end = performance.now();
    this.next = end + 100 + SHARE * (end - begun);
  }
}
