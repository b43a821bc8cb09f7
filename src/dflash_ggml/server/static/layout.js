// What is open beside the conversation: the list on the left, the tree on the right. On narrow screens either lies
// over the conversation, and neither is open at first.

import { $ } from "./dom.js";
import { recall, remember } from "./store.js";

const WIDE = matchMedia("(min-width: 62rem)");
const SIDES = { list: ["list", "toggle-list", "close-list"], panel: ["panel", "toggle-tree", "close-tree"] };

export class Layout {
  /** opened(side): called when a side comes into view. */
  constructor(opened) {
    this.opened = opened;
    for (const [side, [, toggle, close]] of Object.entries(SIDES)) {
      $(toggle).addEventListener("click", () => this.set(side, $(side).hidden, true));
      $(close).addEventListener("click", () => this.set(side, false, true));
    }
    $("scrim").addEventListener("click", () => this.closeOverlays());
    WIDE.addEventListener("change", () => this.begin());
    this.begin();
    this.edge();
  }

  /** The border between conversation and tree can be drawn to and fro, or moved with the arrow keys. */
  edge() {
    const edge = $("edge");
    const share = () => (100 * $("panel").offsetWidth) / document.body.offsetWidth;
    const widen = (percent) => {
      const width = Math.max(20, Math.min(75, percent));
      document.documentElement.style.setProperty("--panel", `${width}%`);
      edge.setAttribute("aria-valuenow", String(Math.round(width)));
      this.opened("panel");
    };
    const keep = () => remember("panel-width", share().toFixed(1));
    edge.addEventListener("pointerdown", (event) => edge.setPointerCapture(event.pointerId));
    edge.addEventListener("pointermove", (event) => {
      if (edge.hasPointerCapture(event.pointerId)) widen(100 * (1 - event.clientX / document.body.offsetWidth));
    });
    edge.addEventListener("pointerup", keep);
    edge.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: 3, ArrowRight: -3 }[event.key];
      if (!by) return;
      event.preventDefault();
      widen(share() + by);
      keep();
    });
    widen(Number(recall("panel-width")) || 36);
  }

  begin() {
    for (const side of Object.keys(SIDES)) this.set(side, WIDE.matches && recall(side) !== "closed");
  }

  set(side, open, chosen = false) {
    if (open && !WIDE.matches) this.closeOverlays();
    const inside = $(side).contains(document.activeElement);
    $(side).hidden = !open;
    $(SIDES[side][1]).setAttribute("aria-expanded", String(open));
    if (chosen && WIDE.matches) remember(side, open ? "open" : "closed");
    $("scrim").hidden = WIDE.matches || ($("list").hidden && $("panel").hidden);
    $("talk").inert = !$("scrim").hidden; // what lies below an open side is out of reach
    if (chosen && open && !WIDE.matches) $(SIDES[side][2]).focus();
    if (!open && inside) $(SIDES[side][1]).focus();
    if (open) this.opened(side);
  }

  /** Closes what lies over the conversation; true if something did. */
  closeOverlays() {
    if (WIDE.matches) return false;
    const open = Object.keys(SIDES).filter((side) => !$(side).hidden);
    open.forEach((side) => this.set(side, false));
    return open.length > 0;
  }
}
