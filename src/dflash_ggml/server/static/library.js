// The kept conversations: the store, the list at the side, export and import.

import { asMarkdown, fromJson, path } from "./conversation.js";
import { $, download, toast } from "./dom.js";
import { Sidebar } from "./sidebar.js";
import { openStore } from "./store.js";

export class Library {
  /** page: open(conversation), blank(), current() and the running `answers` by conversation id. */
  constructor(page) {
    this.page = page;
    this.ready = openStore();
    this.gone = new Set(); // ids deleted while something may still want to save them
    this.others = new BroadcastChannel("dflash-conversations");
    this.others.addEventListener("message", ({ data }) => this.changedElsewhere(data));
    this.sidebar = new Sidebar({
      open: (id) => this.open(id),
      rename: (id, title) => this.rename(id, title),
      remove: (id) => this.remove(id),
      exportJson: async (id) => this.export([await this.find(id)]),
      exportMarkdown: async (id) => {
        const one = await this.find(id);
        download(`${fileName(one.title)}.md`, "text/markdown", asMarkdown(one));
      },
    });
    $("remove-all").addEventListener("click", () => this.removeAll());
    $("export-all").addEventListener("click", () => this.exportAll());
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.import([...$("import-file").files]));
  }

  async begin() {
    await this.openAddress();
    await this.refresh();
    if (!(await this.ready).lasting) toast("This browser stores nothing for this page: conversations are lost when it is closed");
  }

  /** Opens the conversation that the address names. */
  async openAddress() {
    const id = location.hash.slice(1);
    if (id === this.page.current().id) return;
    const found = id && (await this.find(id));
    if (found) this.page.open(found);
    else if (path(this.page.current()).length) this.page.blank();
  }

  /** A conversation by id: the object in use, if it is. */
  async find(id) {
    const current = this.page.current();
    if (current.id === id) return current;
    const answer = this.page.answers.get(id);
    if (answer) return answer.conversation;
    const kept = await (await this.ready).get(id);
    if (kept) for (const node of Object.values(kept.nodes)) markInterrupted(node);
    return kept;
  }

  async refresh() {
    const heads = await (await this.ready).heads();
    this.sidebar.show(heads, this.page.current().id, new Set(this.page.answers.keys()));
  }

  async save(conversation) {
    if (this.gone.has(conversation.id)) return;
    try {
      await (await this.ready).put(conversation);
      this.others.postMessage(conversation.id);
    } catch (error) {
      toast(`The conversation could not be saved: ${error?.message ?? "the browser refused"}`);
    }
    await this.refresh();
  }

  async changedElsewhere(id) {
    await this.refresh();
    const current = this.page.current();
    if (current.id !== id || this.page.answers.has(id)) return;
    const kept = await (await this.ready).get(id);
    if (kept) this.page.open(kept);
  }

  async open(id) {
    const found = await this.find(id);
    if (found) this.page.open(found);
    else await this.refresh();
  }

  async rename(id, title) {
    const one = await this.find(id);
    one.title = title;
    await this.save(one);
    if (one === this.page.current()) document.title = title;
  }

  async remove(id) {
    await this.removeThese([await this.find(id)], "Conversation deleted");
  }

  async removeAll() {
    const all = await this.all();
    if (all.length) await this.removeThese(all, `${all.length} conversation${all.length === 1 ? "" : "s"} deleted`);
  }

  async removeThese(list, message) {
    for (const { id } of list) {
      this.page.answers.get(id)?.stop();
      this.gone.add(id);
      await (await this.ready).remove(id);
    }
    if (this.gone.has(this.page.current().id)) this.page.blank();
    await this.refresh();
    toast(message, "Undo", async () => {
      for (const one of list) {
        this.gone.delete(one.id);
        await this.save(one);
      }
    });
  }

  async all() {
    const heads = await (await this.ready).heads();
    return Promise.all(heads.map((head) => this.find(head.id)));
  }

  export(list) {
    const name = list.length === 1 ? fileName(list[0].title) : "conversations";
    download(`${name}.json`, "application/json", JSON.stringify(list.length === 1 ? list[0] : list, null, 1));
  }

  async exportAll() {
    const all = await this.all();
    if (all.length) this.export(all);
    else toast("There is nothing to export yet");
  }

  async import(files) {
    $("import-file").value = "";
    for (const file of files) {
      try {
        const list = fromJson(await file.text());
        for (const one of list) await this.save(one);
        toast(`${list.length} conversation${list.length === 1 ? "" : "s"} imported`);
      } catch (error) {
        toast(`${file.name}: ${error.message}`);
      }
    }
  }
}

/** Mark an answer that was still streaming when its page was closed. */
function markInterrupted(node) {
  if (node.role !== "assistant" || node.facts !== undefined || node.error) return;
  node.facts = "interrupted";
  node.cut = true;
}

function fileName(title) {
  return title.replace(/[^\p{L}\p{N} ._-]+/gu, " ").trim().slice(0, 60) || "conversation";
}
