// One answer on its way: the request for a message, and what its events add to that message.

import { history, wording } from "./conversation.js";
import { stream } from "./stream.js";

function prompt(conversation, node, settings, further) {
  const question = conversation.nodes[node.parent];
  const body = settings.options(node.kind);
  if (node.kind === "text") {
    return ["v1/completions", { ...body, prompt: wording(question) + (further ? node.content : "") }];
  }
  const messages = history(conversation, further ? node.id : question.id);
  if (further) {
    if (node.reasoning) messages.at(-1).reasoning_content = node.reasoning;
    body.continue_final_message = true;
  }
  if (settings.system) messages.unshift({ role: "system", content: settings.system });
  return ["v1/chat/completions", { ...body, messages }];
}

export class Answer {
  /** Will fill `node`; `steps` grows by what is reported; changed(answer) is called after every event. */
  constructor(conversation, node, steps, changed) {
    this.conversation = conversation;
    this.node = node;
    this.changed = changed;
    this.steps = steps;
    this.tokens = 0;
    this.drafted = 0;
    this.accepted = 0;
    this.passes = 0; // of the model, the prompt's own left out
    this.first = null;
    this.begun = performance.now();
    this.abort = new AbortController();
  }

  /** Asks and reads until the end; further: go on behind what the message holds. Never throws: what went wrong is on the message. */
  async run(settings, model, contextSize, further) {
    const { node } = this;
    const [path, body] = prompt(this.conversation, node, settings, further);
    const before = node.facts;
    delete node.error;
    delete node.facts; // also the mark of an answer that is not complete
    let note = "";
    try {
      for await (const event of stream(path, { model, ...body }, settings.key, this.abort.signal)) {
        this.take(event);
        this.changed(this);
      }
    } catch (error) {
      if (error.name === "AbortError") note = "stopped";
      else {
        note = "failed";
        node.error = { message: error.message, status: error.status ?? 0, retryAfter: error.retryAfter ?? 0 };
      }
    }
    this.finish(note, contextSize);
    if (node.error && !this.heard && before) node.facts = before;
  }

  stop() {
    this.abort.abort();
  }

  take(event) {
    const { node } = this;
    this.heard = true;
    const choice = event.choices?.[0];
    const delta = choice?.delta ?? { content: choice?.text };
    if (event.prompt_progress) this.progress = event.prompt_progress;
    if (event.dflash?.step) this.step(event.dflash.step);
    if (delta.reasoning_content) node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
    if (delta.content) {
      if (node.reasoning) node.thought ??= (performance.now() - this.begun) / 1000;
      node.content += delta.content;
    }
    if (event.timings) this.timings = event.timings;
    if (event.usage) node.used = event.usage.total_tokens;
    if (choice?.finish_reason) this.reason = choice.finish_reason;
  }

  step(step) {
    if (step.mode !== "prefill") { // the prompt's own pass gives one token without a tree
      this.steps.push(step);
      this.passes += 1;
    }
    this.first ??= performance.now();
    this.tokens += step.emitted.length;
    this.drafted += Math.max(0, step.tokens.length - 1);
    this.accepted += step.accepted;
  }

  /** Tokens of the context that are taken so far; 0 while that is unknown. */
  get used() {
    return this.progress ? this.progress.total + this.tokens : 0;
  }

  get waiting() {
    return this.progress && this.progress.processed < this.progress.total;
  }

  /** One line about how it goes. */
  status() {
    if (!this.heard) return performance.now() - this.begun > 1000 ? "waiting for the server, which may be answering someone else" : "";
    if (this.waiting) return `reading the prompt, ${this.progress.processed} of ${this.progress.total} tokens`;
    const seconds = this.first === null ? 0 : (performance.now() - this.first) / 1000;
    if (!seconds || this.tokens < 2) return "";
    return line(this.tokens, (this.tokens - 1) / seconds, this.passes ? (this.tokens - 1) / this.passes : 0, this.accepted, this.drafted);
  }

  finish(note, contextSize) {
    const { node, timings: t } = this;
    const numbers = t ? line(t.predicted_n, t.predicted_per_second, t.tokens_per_step, t.draft_n_accepted, t.draft_n) : this.heard && this.status();
    const full = this.reason === "length" && contextSize > 0 && node.used >= contextSize;
    const cut = node.content || !node.reasoning ? "cut at the longest answer" : "cut at the longest answer, while it was thinking";
    const why = note || (full ? "the context is full" : this.reason === "length" ? cut : "");
    node.cut = Boolean(note) || (this.reason === "length" && !full);
    node.facts = [numbers, why].filter(Boolean).join("; ");
    this.ended = true;
    if (!node.used && this.used) node.used = this.used;
  }
}

function line(tokens, rate, perStep, accepted, drafted) {
  const share = drafted ? `, ${accepted} of ${drafted} candidates accepted` : "";
  return `${tokens} tokens, ${rate.toFixed(1)} tokens/s, ${perStep.toFixed(2)} tokens per step${share}`;
}
