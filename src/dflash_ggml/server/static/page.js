// The page: the open conversation, the answers on their way, and everything that its parts ask for.

import { Answer } from "./answer.js";
import { Composer } from "./composer.js";
import { addMessage, choose, newConversation, path, removeMessage } from "./conversation.js";
import { $, dressButtons, say, toast } from "./dom.js";
import { Layout } from "./layout.js";
import { Library } from "./library.js";
import { MessageView } from "./messages.js";
import { TreePanel } from "./panel.js";
import { SettingsDialog } from "./settings.js";
import { recall, remember } from "./store.js";
import { get } from "./stream.js";

const PAINT_SHARE = 6; // painting waits this many times as long as the last one took
const SAVE_EVERY = 2000; // ms, of an answer on its way
const STEPS_KEPT = 30; // answers whose trees can still be looked at

let conversation = newConversation();
let model = null;
let contextSize = 0;
const running = new Map(); // conversation id -> Answer
const stepsOf = new Map(); // message -> its steps
const view = new MessageView($("messages"), $("to-end"), act, (node) => stepsOf.get(node)?.length > 0);
const panel = new TreePanel();
const settings = new SettingsDialog(() => connect());
const composer = new Composer(ask, () => running.get(conversation.id)?.stop());
const library = new Library({ open, current: () => conversation, answers: running, blank: () => open(null) });
dressButtons();
const layout = new Layout((side) => {
  if (side === "panel") panel.resized();
});

// ---- what is shown

function show() {
  const answer = running.get(conversation.id);
  const nodes = path(conversation);
  view.show(conversation, nodes, answer?.node, settings.kind === "text");
  composer.running(Boolean(answer));
  showProgress(answer);
  document.title = conversation.title || model || "dflash-ggml";
}

function showProgress(answer) {
  const waiting = answer?.waiting;
  $("prefill").hidden = !waiting;
  if (waiting) $("prefill").value = answer.progress.processed / answer.progress.total;
  $("speed").textContent = answer?.status() ?? "";
  const used = answer?.used || path(conversation).findLast((node) => node.used)?.used || 0;
  $("context").hidden = !used || !contextSize;
  $("context-bar").value = contextSize ? used / contextSize : 0;
  $("context-text").textContent = `${used.toLocaleString("en")} / ${contextSize.toLocaleString("en")}`;
  $("context").title = `${used} of the ${contextSize} tokens of the context are used`;
}

/** Opens a conversation of the library, or an empty one for null. */
function open(other) {
  conversation = other ?? newConversation();
  const address = other ? `#${other.id}` : location.pathname;
  if (location.hash !== (other ? address : "")) history.pushState(null, "", address);
  const last = path(conversation).findLast((node) => stepsOf.has(node));
  panel.watch(stepsOf.get(last) ?? []);
  show();
  view.scrollToEnd();
  layout.closeOverlays();
  library.refresh();
  focusPrompt();
}

// ---- asking

function ask(text, files) {
  if (running.has(conversation.id)) return false;
  const kind = settings.kind;
  const question = { role: "user", content: kind === "text" ? text : text.trim(), kind };
  if (files.length) question.files = files;
  addMessage(conversation, conversation.head, question);
  view.scrollToEnd();
  answer(conversation, conversation.head);
  return true;
}

/** Answers the message `parent`, in a new message; or goes on in `node`. */
async function answer(where, parent, node = null) {
  const further = node !== null;
  if (!further) {
    const kind = where.nodes[parent].kind ?? settings.kind;
    node = addMessage(where, parent, { role: "assistant", kind, model });
  }
  const steps = (further && stepsOf.get(node)) || [];
  const mine = new Answer(where, node, steps, changed);
  running.set(where.id, mine);
  where.updated = Date.now();
  stepsOf.set(node, steps);
  if (stepsOf.size > STEPS_KEPT) stepsOf.delete(stepsOf.keys().next().value);
  if (where === conversation) {
    if (location.hash !== `#${where.id}`) history.replaceState(null, "", `#${where.id}`);
    panel.watch(steps);
    show();
    say("Answering");
  }
  library.save(where);
  setTimeout(() => changed(mine), 1200);
  await mine.run(settings, model, contextSize, further);
  running.delete(where.id);
  where.updated = Date.now();
  library.save(where);
  if (where === conversation) {
    show();
    panel.refresh();
    say(node.error ? "The answer failed" : "Answer complete");
  }
  if (node.error?.status === 401) settings.open("key");
  if ([0, 404, 503].includes(node.error?.status)) connect(); // gone, or another one by now
}

let painting = false, nextPaint = 0;

/** Paints what came, once per frame at most, and less often where a frame takes long. */
function changed(mine) {
  if (mine.ended) return;
  if (performance.now() - (mine.saved ?? mine.begun) > SAVE_EVERY) {
    mine.saved = performance.now();
    library.save(mine.conversation);
  }
  if (painting || mine.conversation !== conversation) return;
  painting = true;
  setTimeout(() => requestAnimationFrame(() => {
    painting = false;
    const shown = running.get(conversation.id);
    if (!shown) return;
    const begun = performance.now();
    view.paint(shown.node, true);
    showProgress(shown);
    panel.refresh();
    nextPaint = begun + (1 + PAINT_SHARE) * (performance.now() - begun);
  }), Math.max(0, nextPaint - performance.now()));
}

// ---- what the buttons of a message ask for

function act(name, node, text) {
  const where = conversation;
  if (running.has(where.id)) {
    if (name !== "tree" && name !== "choose") toast("Stop the answer first, or wait for its end");
    if (name !== "tree") return;
  }
  const actions = {
    again: () => answer(where, node.parent),
    further: () => answer(where, node.parent, node),
    retry: () => {
      if (node.content) return answer(where, node.parent, node);
      removeMessage(where, node);
      return answer(where, node.parent);
    },
    edit: () => edit(where, node, text),
    choose: () => choose(where, node),
    remove: () => remove(where, node),
    tree: () => {
      layout.set("panel", true, true);
      panel.watch(stepsOf.get(node) ?? []);
    },
  };
  actions[name]();
  if (name === "tree") return;
  show();
  library.save(where);
  if (name === "choose") view.focusVersions(node);
  else focusPrompt(); // the button that was pressed is gone
}

function focusPrompt() {
  if (matchMedia("(hover: hover)").matches) $("prompt").focus(); // elsewhere it would call up the keyboard
}

function edit(where, node, text) {
  if (node.role === "assistant") {
    node.content = text;
    delete node.error;
    return;
  }
  const { role, kind, files, parent } = node;
  const fresh = addMessage(where, parent, { role, kind, content: text, ...(files && { files }) });
  answer(where, fresh.id);
}

function remove(where, node) {
  const before = structuredClone(where);
  removeMessage(where, node);
  toast("Message deleted", "Undo", () => {
    if (running.has(where.id)) return;
    Object.assign(where, before);
    if (where === conversation) show();
    library.save(where);
  });
}

// ---- controls of the page

function newChat() {
  running.get(conversation.id)?.stop(); // its text stays with its own conversation
  open(null);
}

$("fresh").addEventListener("click", newChat);

document.addEventListener("keydown", (event) => {
  const shortcut = event.ctrlKey || event.metaKey;
  if (shortcut && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    newChat();
  } else if (shortcut && !event.shiftKey && event.key.toLowerCase() === "k") {
    event.preventDefault();
    layout.set("list", true, true);
    $("search").focus();
  }
  if (event.key !== "Escape" || event.defaultPrevented || $("settings").open) return;
  if (!layout.closeOverlays()) running.get(conversation.id)?.stop();
});

$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  remember("theme", root.dataset.theme);
});

window.addEventListener("pagehide", () => {
  for (const mine of running.values()) library.save(mine.conversation);
});
window.addEventListener("popstate", () => library.openAddress());

function state(text, kind) {
  $("status").textContent = text;
  $("status").className = `badge ${kind}`;
}

let retry = 0;

async function connect() {
  clearTimeout(retry);
  const health = await fetch("health").then((r) => r.json()).catch(() => null);
  if (!health || health.status !== "ok") {
    const share = health?.total ? ` ${Math.floor((100 * health.done) / health.total)}%` : "";
    state(health ? health.status + share : "not reachable", health ? "" : "bad");
    retry = setTimeout(connect, 1000);
    return;
  }
  try {
    const props = await get("props", settings.key);
    model = props.model_alias;
    contextSize = props.default_generation_settings?.n_ctx ?? props.n_ctx ?? 0;
    $("model").textContent = model;
    settings.serverValues(props);
    state(props.has_draft ? `${props.mode} ${props.budget}` : "no draft", "good");
    if (!props.has_draft && !recall("panel")) layout.set("panel", false); // there will be no trees
    show();
  } catch (error) {
    state(error.status === 401 ? "needs a key" : error.message, "bad");
    if (error.status === 401) settings.open("key");
  }
}

show();
connect();
library.begin();
