// A conversation as plain data: a tree of messages, of which the path to `head` is shown. Asking again or changing
// a question adds a sibling; no message is lost until it is deleted.

const TITLE = 60; // characters of the first question

export function newConversation() {
  const now = Date.now();
  return { id: crypto.randomUUID?.() ?? `${now}-${Math.random()}`, title: "", created: now, updated: now, head: null, count: 0, nodes: {} };
}

/** A new message under `parent` (a message's id or null); it becomes the head. */
export function addMessage(conversation, parent, message) {
  conversation.count += 1;
  const node = { id: `m${conversation.count}`, parent, created: Date.now(), content: "", ...message };
  conversation.nodes[node.id] = node;
  conversation.head = node.id;
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node);
  return node;
}

function titleOf(node) {
  const line = node.content.trim().split("\n")[0] || node.files?.[0]?.name || "Conversation";
  return line.length > TITLE ? `${line.slice(0, TITLE - 1)}…` : line;
}

/** The messages from the first one to `id`, by default the head. */
export function path(conversation, id = conversation.head) {
  const out = [];
  for (let node = conversation.nodes[id]; node; node = conversation.nodes[node.parent]) out.push(node);
  return out.reverse();
}

function children(conversation, parent) {
  return Object.values(conversation.nodes).filter((node) => node.parent === parent).sort((a, b) => number(a) - number(b));
}

function number(node) {
  return Number(node.id.slice(1));
}

/** All versions of a message, itself included, oldest first. */
export function versions(conversation, node) {
  return children(conversation, node.parent);
}

/** Shows the branch through `node`, down to its newest message. */
export function choose(conversation, node) {
  let last = node;
  for (let below; (below = children(conversation, last.id).at(-1)); ) last = below;
  conversation.head = last.id;
}

/** Takes out a message and all that follows it; another version of it comes forward. */
export function removeMessage(conversation, node) {
  const gone = [node];
  for (const one of gone) gone.push(...children(conversation, one.id));
  const others = versions(conversation, node).filter((other) => other !== node);
  for (const one of gone) delete conversation.nodes[one.id];
  if (conversation.nodes[conversation.head]) return;
  if (others.length) choose(conversation, others.at(-1));
  else conversation.head = node.parent;
}

/** What the model sees of a message's files and text. */
export function wording(node) {
  const files = (node.files ?? []).map(({ name, text }) => {
    const fence = "`".repeat(Math.max(3, ...(text.match(/`+/g) ?? []).map((run) => run.length + 1)));
    return `File: ${name}\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...files, node.content].filter(Boolean).join("\n\n");
}

/** The messages to send for an answer below `id`. A question whose answer failed without a word is not repeated. */
export function history(conversation, id) {
  const nodes = path(conversation, id);
  const failed = (node) => node?.role === "assistant" && node.error && !node.content;
  return nodes
    .filter((node, i) => !failed(node) && !(node.role === "user" && failed(nodes[i + 1])))
    .map((node) => ({ role: node.role, content: wording(node) }));
}

export function asMarkdown(conversation) {
  const names = { user: "You", assistant: "Answer" };
  const parts = path(conversation).map((node) => `## ${names[node.role]}\n\n${wording(node)}\n`);
  return [`# ${conversation.title}\n`, ...parts].join("\n");
}

/** Conversations from an exported file, under new ids. Throws an Error that says what is wrong with it. */
export function fromJson(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("this file is not JSON");
  }
  const list = Array.isArray(data) ? data : [data];
  if (!list.length || !list.every(isConversation)) throw new Error("this file holds no conversation exported from here");
  return list.map((one) => {
    const count = Math.max(0, ...Object.values(one.nodes).map(number));
    return { ...newConversation(), ...one, id: newConversation().id, count };
  });
}

function isConversation(one) {
  return typeof one?.title === "string" && typeof one.nodes === "object" && one.nodes !== null
    && (one.head === null || one.head in one.nodes)
    && Object.entries(one.nodes).every(([id, node]) => node?.id === id && isMessage(node, one.nodes));
}

function isMessage(node, nodes) {
  const above = node.parent === null || (node.parent in nodes && number(nodes[node.parent]) < number(node)); // no circles
  const isFile = (file) => typeof file?.name === "string" && typeof file.text === "string";
  return /^m\d+$/.test(node.id) && above && ["user", "assistant"].includes(node.role) && typeof node.content === "string"
    && (node.files === undefined || (Array.isArray(node.files) && node.files.every(isFile)));
}
