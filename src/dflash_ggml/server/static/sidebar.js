// The list of kept conversations: search, rename, export, delete.

import { $, iconButton, make } from "./dom.js";

const DAY = 86_400_000;

function age(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  return time >= midnight - 7 * DAY ? "Last seven days" : "Earlier";
}

export class Sidebar {
  /** actions: open(id), rename(id, title), exportJson(id), exportMarkdown(id), remove(id). */
  constructor(actions) {
    this.actions = actions;
    this.heads = [];
    this.current = null;
    this.busy = new Set(); // ids of conversations with an answer on its way
    $("search").addEventListener("input", () => this.draw());
    document.addEventListener("click", (event) => {
      if (this.menu && !event.target.closest(".entry-menu, .more-button")) this.closeMenu();
    });
    $("conversations").addEventListener("keydown", (event) => this.keys(event));
  }

  show(heads, current, busy) {
    const sorted = heads.toSorted((a, b) => b.updated - a.updated);
    const key = JSON.stringify([sorted, current, [...busy]]);
    if (key === this.shown) return; // an answer on its way is saved often: an open menu stays
    Object.assign(this, { shown: key, heads: sorted, current, busy });
    if (!this.renaming) this.draw();
  }

  draw() {
    this.closeMenu();
    const wanted = $("search").value.trim().toLowerCase();
    const shown = this.heads.filter((head) => head.title.toLowerCase().includes(wanted));
    const groups = Map.groupBy ? Map.groupBy(shown, (head) => age(head.updated)) : new Map([["All", shown]]);
    const out = [...groups].map(([name, heads]) => make("section", {}, make("h2", { text: name }),
      make("ul", {}, ...heads.map((head) => this.entry(head)))));
    if (!out.length) out.push(make("p", { class: "quiet", text: wanted ? "No matching titles." : "No saved conversations yet." }));
    $("conversations").replaceChildren(...out);
  }

  entry(head) {
    const open = make("button", { type: "button", class: "entry", title: head.title, text: head.title,
      "aria-current": head.id === this.current ? "true" : null, click: () => this.actions.open(head.id) });
    if (this.busy.has(head.id)) open.append(make("i", { class: "busy", "aria-label": "answering" }));
    const more = iconButton("more", `More for ${head.title}`, () => this.toggleMenu(head, item, more), {
      class: "icon-button more-button", "aria-haspopup": "menu", "aria-expanded": "false" });
    const item = make("li", {}, open, more);
    return item;
  }

  toggleMenu(head, item, button) {
    const mine = this.menu?.parentNode === item;
    this.closeMenu();
    if (mine) return;
    const choice = (text, act) => make("button", { type: "button", role: "menuitem", text, click: () => {
      this.closeMenu();
      act();
    } });
    this.menu = make("div", { class: "entry-menu", role: "menu" },
      choice("Rename", () => this.rename(head, item)),
      choice("Export as Markdown", () => this.actions.exportMarkdown(head.id)),
      choice("Export as JSON", () => this.actions.exportJson(head.id)),
      choice("Delete", () => this.actions.remove(head.id)));
    this.opener = button;
    button.setAttribute("aria-expanded", "true");
    item.append(this.menu);
    this.menu.firstChild.focus();
    this.menu.scrollIntoView({ block: "nearest" });
  }

  closeMenu() {
    this.menu?.remove();
    this.menu = null;
    this.opener?.setAttribute("aria-expanded", "false");
  }

  keys(event) {
    if (!this.menu) return;
    const all = [...this.menu.children];
    const at = all.indexOf(document.activeElement);
    if (event.key === "Escape") {
      event.stopPropagation();
      this.closeMenu();
      this.opener.focus();
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      all[(at + (event.key === "ArrowDown" ? 1 : all.length - 1)) % all.length].focus();
    }
  }

  rename(head, item) {
    const field = make("input", { type: "text", class: "entry", value: head.title, "aria-label": "Title", maxlength: 120 });
    this.renaming = true;
    const end = (keep) => {
      if (!this.renaming) return;
      this.renaming = false;
      const title = field.value.trim();
      if (keep && title && title !== head.title) this.actions.rename(head.id, title);
      else this.draw();
    };
    field.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter" && !event.isComposing) end(true);
      if (event.key === "Escape") end(false);
    });
    field.addEventListener("blur", () => end(true));
    item.replaceChildren(field);
    field.select();
  }
}
