// Where the next message is written, with its files.

import { $, toast } from "./dom.js";
import { readFiles } from "./files.js";
import { fileChip } from "./messages.js";

export class Composer {
  /** send(text, files): returns true when the message was taken. stop(): ends the running answer. */
  constructor(send, stop) {
    this.files = [];
    this.send = send;
    const prompt = $("prompt");
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    $("stop").addEventListener("click", stop);
    prompt.addEventListener("input", () => this.grow());
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      $("composer").requestSubmit();
    });
    prompt.addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      if (!files.length) return;
      event.preventDefault();
      this.attach(files);
    });
    $("attach").addEventListener("click", () => $("attach-file").click());
    $("attach-file").addEventListener("change", async () => {
      await this.attach([...$("attach-file").files]);
      $("attach-file").value = "";
      prompt.focus();
    });
    this.takeDrops();
  }

  takeDrops() {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    document.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      $("drop").hidden = false;
    });
    document.addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) $("drop").hidden = true;
    });
    document.addEventListener("drop", (event) => {
      $("drop").hidden = true;
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.attach([...event.dataTransfer.files]);
    });
  }

  async attach(files) {
    const read = await readFiles(files, this.files);
    this.files.push(...read.files);
    this.chips();
    if (read.problems.length) toast(`Not attached: ${read.problems.join("; ")}`);
  }

  chips() {
    $("chips").hidden = !this.files.length;
    $("chips").replaceChildren(...this.files.map((file) => fileChip(file, () => {
      this.files = this.files.filter((other) => other !== file);
      this.chips();
      $("prompt").focus();
    })));
  }

  submit() {
    const text = $("prompt").value;
    if ((!text.trim() && !this.files.length) || !this.send(text, this.files)) return;
    $("prompt").value = "";
    this.files = [];
    this.chips();
    this.grow();
  }

  grow() {
    $("prompt").style.height = "auto";
    $("prompt").style.height = `${$("prompt").scrollHeight}px`;
  }

  running(is) {
    const had = document.activeElement === $("send") || document.activeElement === $("stop");
    $("send").hidden = is;
    $("stop").hidden = !is;
    if (had) $("prompt").focus();
  }
}
