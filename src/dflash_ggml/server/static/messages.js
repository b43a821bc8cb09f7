// The messages of the open conversation, each with what can be done about it.

import { versions, wording } from "./conversation.js";
import { copyText, icon, iconButton, make } from "./dom.js";
import { sizeText } from "./files.js";
import { Markdown } from "./markdown.js";

const NEAR = 60; // pixels from the end that still count as there

/** One message on the page. */
class Item {
  constructor(node, view) {
    this.node = node;
    this.view = view;
    const kind = node.kind === "text" ? `${node.role} continued` : node.role;
    this.element = make("article", { class: `message ${kind}`, "aria-label": node.role === "user" ? "You" : "Answer" });
    this.text = make("div", { class: "text" });
    this.tools = make("div", { class: "tools" });
    if (node.role === "assistant" && node.kind !== "text") this.markdown = new Markdown(this.text);
    this.element.append(this.text, this.tools);
  }

  /** live: more is to come. */
  paint(live) {
    const { node } = this;
    if (this.editing) return;
    if (this.markdown) this.markdown.update(node.content, !live);
    else this.plain(node.content);
    this.element.setAttribute("aria-busy", String(live));
    this.element.classList.toggle("live", live);
    if (node.files?.length && !this.files) {
      this.files = make("ul", { class: "chips", "aria-label": "Files" }, ...node.files.map(fileChip));
      this.element.prepend(this.files);
    }
    this.reasoning(live);
    this.error(live);
    this.text.hidden = !node.content && node.role === "user";
    if (live) this.tools.replaceChildren();
    else this.ended();
  }

  plain(text) {
    if (text.startsWith(this.shown ?? "")) this.text.append(text.slice(this.shown?.length ?? 0));
    else this.text.textContent = text;
    this.shown = text;
  }

  reasoning(live) {
    const { node } = this;
    if (!node.reasoning) return;
    if (!this.fold) {
      this.fold = make("details", { class: "reasoning" }, make("summary"), make("div"));
      this.thoughts = new Markdown(this.fold.lastChild);
      this.element.prepend(this.fold);
    }
    const over = !live || node.content;
    const took = node.thought ? `Thought for ${node.thought.toFixed(1)} s` : "Thought";
    this.fold.firstChild.textContent = over ? took : "Thinking…";
    this.thoughts.update(node.reasoning, Boolean(over));
  }

  error(live) {
    const error = live ? undefined : this.node.error;
    if (error === this.failed) return;
    this.failed = error;
    this.failure?.remove();
    if (!error) return;
    const again = make("button", { type: "button", text: "Try again", click: () => this.view.act("retry", this.node) });
    this.failure = make("div", { class: "error", role: "alert" }, make("p", { text: error.message }), again);
    if (error.retryAfter) this.failure.firstChild.append(` (try again in ${error.retryAfter} s)`);
    this.tools.before(this.failure);
  }

  /** Facts and buttons below a message that is complete. */
  ended() {
    const { node, view } = this;
    const act = (name) => () => view.act(name, node);
    const copy = iconButton("copy", "Copy", () => copyText(node.role === "user" ? wording(node) : node.content, copy));
    const out = [this.switcher()];
    if (node.content) out.push(copy);
    out.push(iconButton("edit", "Edit", () => this.edit()));
    if (node.role === "assistant") {
      out.push(iconButton("again", "Regenerate", act("again")));
      if (node.content && view.conversation.head === node.id) out.push(iconButton("further", "Continue", act("further"), { class: `icon-button${node.cut ? " wanted" : ""}` }));
      if (view.hasTree(node)) out.push(iconButton("tree", "Show its trees", act("tree")));
    }
    out.push(iconButton("remove", "Delete", act("remove")));
    if (node.facts) out.push(make("span", { class: "facts", text: node.facts }));
    this.tools.replaceChildren(...out.filter(Boolean));
  }

  switcher() {
    const all = versions(this.view.conversation, this.node);
    if (all.length < 2) return null;
    const at = all.indexOf(this.node);
    const go = (other) => () => this.view.act("choose", other);
    return make("span", { class: "versions" },
      iconButton("left", "Earlier version", go(all[at - 1]), { disabled: at === 0 }),
      make("span", { text: `${at + 1}/${all.length}` }),
      iconButton("right", "Later version", go(all[at + 1]), { disabled: at === all.length - 1 }));
  }

  edit() {
    const { node } = this;
    const asks = node.role === "user";
    const area = make("textarea", { "aria-label": asks ? "Your message" : "The answer", rows: Math.min(16, node.content.split("\n").length + 1) });
    area.value = node.content;
    const close = () => {
      this.editing = false;
      form.replaceWith(this.text);
      this.tools.hidden = false;
      this.paint(false);
    };
    const form = make("form", { class: "editing", submit: (event) => {
      event.preventDefault();
      const text = area.value;
      close();
      if (text !== node.content || asks) this.view.act("edit", node, text);
    } }, area, make("div", { class: "bar" }, make("span", { class: "spacer" }),
      make("button", { type: "button", text: "Cancel", click: close }),
      make("button", { type: "submit", class: "primary", text: asks ? "Send" : "Save" })));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && asks) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.editing = true;
    this.tools.hidden = true;
    this.text.replaceWith(form);
    area.focus();
  }
}

export function fileChip(file, remove) {
  const chip = make("li", { class: "chip" }, icon("file"), make("span", { class: "name", text: file.name }),
    make("span", { class: "quiet", text: sizeText(file.size) }));
  if (typeof remove === "function") chip.append(iconButton("close", `Remove ${file.name}`, remove));
  return chip;
}

export class MessageView {
  /** act(name, node, text): what a button asks for; hasTree(node): whether its steps are known. */
  constructor(pane, toEnd, act, hasTree) {
    Object.assign(this, { pane, toEnd, act, hasTree, items: new Map(), atEnd: true });
    pane.addEventListener("scroll", () => {
      this.atEnd = pane.scrollHeight - pane.scrollTop - pane.clientHeight < NEAR;
      toEnd.hidden = this.atEnd;
    });
    toEnd.addEventListener("click", () => this.scrollToEnd());
  }

  /** Shows `nodes`, a path through `conversation`; those that are shown already stay as they are. continues: no chat model. */
  show(conversation, nodes, live, continues) {
    const moved = this.conversation !== conversation;
    this.conversation = conversation;
    const old = this.items;
    this.items = new Map(nodes.map((node) => {
      const item = old.get(node.id)?.node === node ? old.get(node.id) : new Item(node, this);
      item.paint(node === live);
      return [node.id, item];
    }));
    for (const [id, item] of old) if (this.items.get(id) !== item) item.element.remove();
    const elements = [...this.items.values()].map((item) => item.element);
    if (!elements.length) this.pane.replaceChildren(hint(continues));
    else {
      this.pane.querySelector("#hint")?.remove();
      elements.forEach((element, i) => {
        if (this.pane.children[i] !== element) this.pane.insertBefore(element, this.pane.children[i] ?? null);
      });
    }
    if (moved) this.scrollToEnd();
    else this.settle();
  }

  paint(node, live) {
    this.items.get(node.id)?.paint(live);
    this.settle();
  }

  /** Stays at the end if the reader is there. */
  settle() {
    if (this.atEnd) this.pane.scrollTop = this.pane.scrollHeight;
  }

  /** After another version was chosen: its own switch has the focus. */
  focusVersions(node) {
    this.items.get(node.id)?.element.querySelector(".versions button:not(:disabled)")?.focus();
  }

  scrollToEnd() {
    this.atEnd = true;
    this.toEnd.hidden = true;
    this.settle();
  }
}

function hint(continues) {
  const what = continues ? "Begin a text, and the model continues it." : "Ask something.";
  return make("p", { id: "hint", text: `${what} Every answer is drafted as a tree of candidates and checked by the model in one pass per step; the tree panel shows which path it took.` });
}
