import { get, ServerError, stream } from "./stream.js";
import { render } from "./text.js";
import { draw } from "./tree.js";

const $ = (id) => document.getElementById(id);
const history = []; // chat messages so far
let steps = []; // of the latest answer
let follow = true; // the tree shows the newest step until the user picks one
let running = null; // AbortController of the answer in progress
let model = null;

// ---- the tree panel

function showStep(index) {
  const step = steps[index];
  $("step").max = Math.max(0, steps.length - 1);
  $("step").value = index;
  $("step").disabled = steps.length < 2;
  $("before").disabled = index <= 0;
  $("after").disabled = index >= steps.length - 1;
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
  const first = Math.max(0, Math.min(index - 60, steps.length - 120));
  const shown = steps.slice(first, first + 120);
  const most = Math.max(...shown.map((s) => s.emitted.length));
  $("bars").replaceChildren(...shown.map((s, i) => {
    const bar = document.createElement("i");
    bar.style.height = `${(100 * s.emitted.length) / most}%`;
    if (first + i === index) bar.className = "now";
    return bar;
  }));
}

function pick(index) {
  follow = index >= steps.length - 1;
  showStep(Math.max(0, Math.min(steps.length - 1, index)));
}

$("step").addEventListener("input", () => pick(Number($("step").value)));
$("before").addEventListener("click", () => pick(Number($("step").value) - 1));
$("after").addEventListener("click", () => pick(Number($("step").value) + 1));

// ---- one answer

function bubble(kind) {
  $("hint")?.remove();
  const box = document.createElement("div");
  box.className = `message ${kind}`;
  $("messages").append(box);
  return box;
}

function part(box, name, className) {
  const node = document.createElement(name);
  node.className = className;
  box.append(node);
  return node;
}

/** Collects what arrives and paints it at most once per frame. */
class Answer {
  constructor(plain) {
    this.box = bubble(plain ? "assistant continued" : "assistant");
    this.plain = plain;
    this.text = "";
    this.reasoning = "";
    this.tokens = 0;
    this.drafted = 0;
    this.accepted = 0;
    this.decoding = 0; // steps that ran the model
    this.first = null;
    this.begun = performance.now();
    this.painting = false;
  }

  take(event) {
    const choice = event.choices?.[0];
    const delta = choice?.delta ?? { content: choice?.text };
    if (event.prompt_progress) this.progress = event.prompt_progress;
    if (event.dflash?.step) this.step(event.dflash.step);
    if (delta.reasoning_content) this.reasoning += delta.reasoning_content;
    if (delta.content) {
      this.thoughtFor ??= this.reasoning ? (performance.now() - this.begun) / 1000 : null;
      this.text += delta.content;
    }
    if (event.timings) this.timings = event.timings;
    if (choice?.finish_reason) this.reason = choice.finish_reason;
    if (this.painting) return;
    this.painting = true;
    requestAnimationFrame(() => {
      this.painting = false;
      this.paint();
    });
  }

  step(step) {
    if (step.mode !== "prefill") steps.push(step); // the prompt's own pass gives one token without a tree
    this.first ??= performance.now();
    this.tokens += step.emitted.length;
    if (step.mode !== "prefill") this.decoding += 1;
    this.drafted += Math.max(0, step.tokens.length - 1);
    this.accepted += step.accepted;
  }

  paint() {
    if (this.ended) return;
    const pane = $("messages");
    const atEnd = pane.scrollHeight - pane.scrollTop - pane.clientHeight < 60;
    if (this.reasoning) {
      if (!this.fold) {
        this.fold = document.createElement("details");
        this.fold.className = "reasoning";
        this.fold.append(document.createElement("summary"), document.createElement("div"));
        this.box.prepend(this.fold);
      }
      this.fold.firstChild.textContent = this.thoughtFor ? `Thought for ${this.thoughtFor.toFixed(1)} s` : "Thinking…";
      this.fold.lastChild.textContent = this.reasoning;
    }
    this.body ??= part(this.box, "div", "text");
    if (this.plain) this.body.textContent = this.text;
    else render(this.body, this.text);
    if (atEnd) pane.scrollTop = pane.scrollHeight;
    const waiting = this.progress && this.progress.processed < this.progress.total;
    $("prefill").hidden = !waiting;
    if (waiting) $("prefill").value = this.progress.processed / this.progress.total;
    $("speed").textContent = waiting ? `reading the prompt, ${this.progress.processed} of ${this.progress.total} tokens` : this.speed();
    if (follow && steps.length) showStep(steps.length - 1);
  }

  speed() {
    const seconds = this.first === null ? 0 : (performance.now() - this.first) / 1000;
    if (!seconds || this.tokens < 2) return "";
    return this.line(this.tokens, (this.tokens - 1) / seconds, this.decoding ? (this.tokens - 1) / this.decoding : 0, this.accepted, this.drafted);
  }

  line(tokens, rate, perStep, accepted, drafted) {
    const share = drafted ? `, ${accepted} of ${drafted} candidates accepted` : "";
    return `${tokens} tokens, ${rate.toFixed(1)} tokens/s, ${perStep.toFixed(2)} tokens per step${share}`;
  }

  finish(note) {
    this.paint();
    this.ended = true;
    $("prefill").hidden = true;
    $("speed").textContent = "";
    const facts = part(this.box, "div", "facts");
    const t = this.timings;
    const numbers = t ? this.line(t.predicted_n, t.predicted_per_second, t.tokens_per_step, t.draft_n_accepted, t.draft_n) : this.speed();
    const why = note || (this.reason === "length" ? "cut at the longest answer" : "");
    facts.textContent = [numbers, why].filter(Boolean).join("; ");
  }
}

function options() {
  const body = { model, stream: true, return_progress: true, dflash: { return_steps: true } };
  if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
  if ($("limit").value !== "") body.max_tokens = Number($("limit").value);
  if ($("mode").value) body.dflash.mode = $("mode").value;
  if ($("budget").value !== "") body.dflash.budget = Number($("budget").value);
  return body;
}

function request(text) {
  const body = options();
  if ($("kind").value === "text") return ["/v1/completions", { ...body, prompt: text }];
  history.push({ role: "user", content: text });
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...history] : [...history];
  if ($("thinking").value) body.chat_template_kwargs = { enable_thinking: $("thinking").value === "on" };
  return ["/v1/chat/completions", { ...body, messages }];
}

async function ask(text) {
  const plain = $("kind").value === "text";
  bubble("user").textContent = text;
  const [path, body] = request(text);
  steps = [];
  follow = true;
  showStep(0);
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  const answer = new Answer(plain);
  let note = "";
  try {
    for await (const event of stream(path, body, $("key").value, running.signal)) answer.take(event);
  } catch (error) {
    if (error.name === "AbortError") note = "stopped";
    else {
      note = "failed";
      bubble("error").textContent = error.message;
      if (error instanceof ServerError && error.status === 401) $("settings").open = true;
    }
  }
  answer.finish(note);
  if (!plain) {
    // what a failed request asked is taken back, so that the next one does not send it again
    if (note === "failed" && !answer.text) history.pop();
    else history.push({ role: "assistant", content: answer.text });
  }
  running = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  $("prompt").focus();
}

// ---- controls

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (running || !text.trim()) return;
  $("prompt").value = "";
  grow();
  ask($("kind").value === "text" ? text : text.trim());
});
$("stop").addEventListener("click", () => running?.abort());

function grow() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight + 2}px`;
}
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});

$("fresh").addEventListener("click", () => {
  running?.abort();
  history.length = 0;
  steps = [];
  $("messages").replaceChildren();
  showStep(0);
  $("prompt").focus();
});

$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
});
if (localStorage.getItem("theme")) document.documentElement.dataset.theme = localStorage.getItem("theme");

$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  connect();
});

function state(text, kind) {
  $("status").textContent = text;
  $("status").className = `badge ${kind}`;
}

async function connect() {
  const health = await fetch("/health").then((r) => r.json()).catch(() => null);
  if (!health || health.status !== "ok") {
    const share = health?.total ? ` ${Math.floor((100 * health.done) / health.total)}%` : "";
    state(health ? health.status + share : "not reachable", health ? "" : "bad");
    setTimeout(connect, 1000);
    return;
  }
  try {
    const props = await get("/props", $("key").value);
    model = props.model_alias;
    $("model").textContent = model;
    document.title = model;
    if (!props.chat_template) $("kind").value = "text";
    state(props.has_draft ? `${props.mode} ${props.budget}` : "no draft", "good");
  } catch (error) {
    state(error.status === 401 ? "needs a key" : error.message, "bad");
    if (error.status === 401) $("settings").open = true;
  }
}
connect();
