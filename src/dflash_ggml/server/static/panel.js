// The panel of candidate trees: which step of which answer, and its drawing.

import { $ } from "./dom.js";
import { draw } from "./tree.js";

const BARS = 120;

export class TreePanel {
  constructor() {
    this.steps = [];
    this.follow = true; // shows the newest step until the reader picks one
    $("step").addEventListener("input", () => this.pick(Number($("step").value)));
    $("before").addEventListener("click", () => this.pick(this.index - 1));
    $("after").addEventListener("click", () => this.pick(this.index + 1));
    $("tree").addEventListener("pointerover", (event) => this.tell(event));
    $("tree").addEventListener("click", (event) => this.tell(event));
  }

  get index() {
    return Number($("step").value);
  }

  /** Shows the steps of another answer; the list may go on growing. */
  watch(steps) {
    this.steps = steps;
    this.follow = true;
    this.refresh();
  }

  /** Shows the newest step, if that is what the reader follows. */
  refresh() {
    if ($("panel").hidden) return;
    if (this.follow) this.show(this.steps.length - 1);
    else $("step").max = Math.max(0, this.steps.length - 1);
  }

  /** Draws anew for a panel of another size. */
  resized() {
    if (!$("panel").hidden) this.show(this.follow ? this.steps.length - 1 : this.index);
  }

  pick(index) {
    this.follow = index >= this.steps.length - 1;
    this.show(Math.max(0, Math.min(this.steps.length - 1, index)));
  }

  tell(event) {
    const title = event.target.closest(".node")?.querySelector("title");
    if (title) $("node").textContent = title.textContent;
  }

  show(index) {
    const { steps } = this;
    const step = steps[index];
    $("step").max = Math.max(0, steps.length - 1);
    $("step").value = Math.max(0, index);
    $("step").disabled = steps.length < 2;
    $("before").disabled = index <= 0;
    $("after").disabled = index >= steps.length - 1;
    $("node").textContent = "";
    if (!step) {
      $("about").textContent = "No step yet.";
      $("tree").replaceChildren();
      $("bars").replaceChildren();
      return;
    }
    const spent = Object.entries(step.times).map(([name, ms]) => `${name} ${ms.toFixed(1)}`).join(", ");
    const size = Math.max(0, step.tokens.length - 1);
    const gain = `${step.emitted.length} token${step.emitted.length === 1 ? "" : "s"}`;
    $("about").textContent = `Step ${index + 1} of ${steps.length} (${step.mode}): ${size} candidates, ${step.accepted} accepted, ${gain}. ms: ${spent}`;
    draw($("tree"), step);
    const first = Math.max(0, Math.min(index - BARS / 2, steps.length - BARS));
    const shown = steps.slice(first, first + BARS);
    const most = Math.max(...shown.map((s) => s.emitted.length));
    $("bars").replaceChildren(...shown.map((s, i) => {
      const bar = document.createElement("i");
      bar.style.height = `${(100 * s.emitted.length) / most}%`;
      if (first + i === index) bar.className = "now";
      return bar;
    }));
  }
}
