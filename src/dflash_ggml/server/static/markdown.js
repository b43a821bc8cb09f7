// Markdown as it is written: each block becomes DOM nodes of its own, and a block that did not change is left alone.
// Elements are made one by one from the parser's tokens; no HTML text is ever handed to the browser.

import { Marked } from "./vendor/marked.esm.js";
import { CodeBlock } from "./code.js";
import { make } from "./dom.js";
import { formula, formulas } from "./formula.js";

const ENTITIES = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", hellip: "…", mdash: "—", ndash: "–", times: "×",
  deg: "°", copy: "©", reg: "®", trade: "™", middot: "·", bull: "•", larr: "←", rarr: "→", le: "≤", ge: "≥", ne: "≠",
};
const PLAIN_TAGS = new Set(["b", "em", "i", "kbd", "mark", "s", "small", "strong", "sub", "sup", "u"]);
const DEFINITION = /^ {0,3}\[[^\]\n]+\]:[ \t]*\S/m;

const marked = new Marked({ gfm: true, breaks: true, extensions: formulas });

function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w+));/gi, (whole, decimal, hex, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
    const point = decimal ? Number(decimal) : Number.parseInt(hex, 16);
    return point > 0 && point <= 0x10ffff ? String.fromCodePoint(point) : whole;
  });
}

/** The address, if following it is safe, else "". */
function safeAddress(href) {
  try {
    const url = new URL(decoded(href));
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : "";
  } catch {
    return "";
  }
}

function link(token) {
  const href = safeAddress(token.href);
  const node = href
    ? make("a", { href, title: token.title, target: "_blank", rel: "noopener noreferrer" })
    : make("span", { title: token.href });
  return inline(node, token.tokens);
}

function image(token) {
  // nothing is fetched from elsewhere: a picture is a link to itself
  return link({ ...token, tokens: [{ type: "text", text: `🖼 ${token.text || token.href}` }] });
}

const INLINE = {
  strong: (token) => inline(make("strong"), token.tokens),
  em: (token) => inline(make("em"), token.tokens),
  del: (token) => inline(make("del"), token.tokens),
  codespan: (token) => make("code", { text: token.text }),
  br: () => make("br"),
  link,
  image,
  escape: (token) => token.text,
  checkbox: (token) => make("input", { type: "checkbox", disabled: true, checked: token.checked }),
  "inline-formula": (token) => formula(make("span"), token),
};

/** Appends what `tokens` say to `box`; of raw tags only line breaks and a few plain pairs are meant. */
function inline(box, tokens = []) {
  const open = [box];
  for (const token of tokens) {
    const here = open.at(-1);
    if (token.type === "html") {
      const [, slash, name, rest] = /^<(\/?)([a-z]+)\s*(\/?)>$/i.exec(token.raw) ?? [];
      const tag = name?.toLowerCase();
      if (tag === "br") here.append(make("br"));
      else if (PLAIN_TAGS.has(tag) && !slash && !rest) {
        open.push(make(tag));
        here.append(open.at(-1));
      } else if (slash && open.length > 1 && here.localName === tag) open.pop();
      else here.append(token.raw);
    } else if (INLINE[token.type]) {
      here.append(INLINE[token.type](token));
    } else if (token.tokens) {
      inline(here, token.tokens);
    } else {
      here.append(decoded(token.text ?? token.raw));
    }
  }
  return box;
}

function table(token) {
  const row = (cells, name) => make("tr", {}, ...cells.map((cell) => inline(make(name, { align: cell.align }), cell.tokens)));
  const body = make("tbody", {}, ...token.rows.map((cells) => row(cells, "td")));
  return make("div", { class: "wide", tabindex: "0" }, make("table", {}, make("thead", {}, row(token.header, "th")), body));
}

/** One block on the page: its element, and what it was made from. */
class Block {
  constructor(token) {
    this.type = token.type;
    this.kind = kindOf(token);
    if (token.type === "code") {
      this.inner = new CodeBlock(token.lang?.match(/\S+/)?.[0] ?? "");
      this.element = this.inner.element;
    } else if (this.kind) {
      this.element = make(this.kind, { start: token.ordered && token.start !== 1 ? token.start : null });
      this.inner = new Blocks(this.element);
    }
  }

  update(token, done) {
    const key = token.raw + (token.loose ? "\0" : ""); // an item turns loose by what follows it
    const same = this.key === key;
    this.key = key;
    if (this.type === "code") this.inner.update(token.text, done);
    else if (this.inner && (!same || done)) this.inner.update(token.items ?? token.tokens, done);
    else if (!this.inner && !same) {
      const fresh = leaf(token);
      this.element?.replaceWith(fresh);
      this.element = fresh;
    }
  }
}

function kindOf(token) {
  if (token.type === "list") return token.ordered ? "ol" : "ul";
  return { list_item: "li", blockquote: "blockquote" }[token.type] ?? "";
}

function leaf(token) {
  switch (token.type) {
    case "heading": return inline(make(`h${token.depth}`), token.tokens);
    case "hr": return make("hr");
    case "table": return table(token);
    case "html": return make("p", { text: token.raw.trim() });
    case "block-formula": return formula(make("p"), token);
    case "checkbox": return INLINE.checkbox(token);
    case "text": return inline(make("span"), token.tokens ?? [token]);
    default: return inline(make("p"), token.tokens ?? [{ type: "text", text: token.raw }]);
  }
}

function visible(tokens) {
  return tokens.filter((token) => token.type !== "space" && token.type !== "def");
}

/** The blocks inside one element, kept in step with a list of tokens. */
class Blocks {
  constructor(box) {
    this.box = box;
    this.list = [];
  }

  update(tokens, done) {
    const shown = visible(tokens);
    shown.forEach((token, i) => {
      let block = this.list[i];
      if (!block || block.type !== token.type || block.kind !== kindOf(token)) {
        this.list.splice(i).forEach((gone) => gone.element.remove());
        block = this.list[i] = new Block(token);
      }
      block.update(token, done);
      if (block.element.parentNode !== this.box) this.box.append(block.element);
    });
    this.list.splice(shown.length).forEach((gone) => gone.element.remove());
  }

  /** Lets go of the first blocks, those of `tokens`; their elements stay. */
  settle(tokens) {
    const shown = visible(tokens);
    this.list.splice(0, shown.length).forEach((block, i) => block.update(shown[i], true));
  }
}

/** A text that grows, shown in `box`. Blocks before the last one are settled: never parsed or touched again. */
export class Markdown {
  constructor(box) {
    this.box = box;
    this.begin();
  }

  begin() {
    this.box.replaceChildren();
    this.settled = "";
    this.blocks = new Blocks(this.box);
  }

  update(text, done = false) {
    if (done && this.whole === text) return;
    this.whole = done ? text : null;
    try {
      this.draw(text, done);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error; // nested deeper than the parser's stack
      this.begin();
      this.box.append(make("p", { text }));
    }
  }

  draw(text, done) {
    const plain = text.replace(/\r\n?/g, "\n");
    // another text, or a definition that may stand behind its links, in blocks that are settled
    if (!plain.startsWith(this.settled) || (done && this.settled && DEFINITION.test(plain))) this.begin();
    const tokens = marked.lexer(plain.slice(this.settled.length));
    this.blocks.update(tokens, done);
    if (done) return;
    const last = tokens.findLastIndex((token) => token.type !== "space");
    const before = tokens.slice(0, Math.max(0, last));
    const raw = before.map((token) => token.raw).join("");
    if (!raw || !plain.startsWith(raw, this.settled.length)) return;
    this.blocks.settle(before);
    this.settled += raw;
  }
}
