// The settings dialog. Values are kept in this browser; an empty field means the server's own value.

import { $ } from "./dom.js";
import { recall, remember } from "./store.js";

const NUMBERS = { temperature: "temperature", top_p: "top_p", top_k: "top_k", min_p: "min_p", seed: "seed", limit: "max_tokens" };
const OTHERS = ["system", "thinking", "kind", "mode", "budget", "key"];
const FIELDS = [...Object.keys(NUMBERS), ...OTHERS];
const TEXT_LIMIT = 256; // tokens of a continuation, which may have no end of its own

function number(id) {
  const field = $(id);
  return field.value === "" || !field.validity.valid ? undefined : Number(field.value);
}

export class SettingsDialog {
  /** keyChanged: called when another API key was typed. */
  constructor(keyChanged) {
    this.dialog = $("settings");
    this.chats = true;
    let kept = {};
    try {
      kept = JSON.parse(recall("settings") || "{}");
    } catch { /* damaged: as if there were none */ }
    for (const id of FIELDS) if (kept[id] !== undefined) $(id).value = kept[id];
    this.dialog.addEventListener("input", () => this.keep());
    $("key").addEventListener("change", keyChanged);
    $("open-settings").addEventListener("click", () => this.open());
    $("close-settings").addEventListener("click", () => this.dialog.close());
    this.dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.dialog.close();
    });
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // beside the form
    });
    $("reset").addEventListener("click", () => {
      for (const id of FIELDS) if (id !== "key") $(id).value = "";
      this.keep();
    });
  }

  open(field = "system") {
    if (!this.dialog.open) this.dialog.showModal();
    $(field).focus();
  }

  keep() {
    const values = Object.fromEntries(FIELDS.map((id) => [id, $(id).value]).filter(([, value]) => value !== ""));
    remember("settings", JSON.stringify(values));
    this.mark();
  }

  /** A dot at the button while anything but the key differs from the server. */
  mark() {
    $("open-settings").classList.toggle("marked", FIELDS.some((id) => id !== "key" && $(id).value !== ""));
  }

  /** Shows the server's values where nothing is typed. */
  serverValues(props) {
    const params = props.default_generation_settings?.params ?? {};
    // the embedded model knows Python source and no conversation
    const embedded = /\bdemo-target-/.test(`${props.model_alias} ${props.model_path ?? ""}`);
    this.chats = Boolean(props.chat_template) && !embedded;
    for (const id of ["temperature", "top_p", "top_k", "min_p"]) $(id).placeholder = params[id] ?? "";
    $("seed").placeholder = params.seed ?? "random";
    $("limit").placeholder = params.max_tokens ?? (this.kind === "text" ? TEXT_LIMIT : "to its end");
    $("budget").placeholder = props.budget ?? "";
    this.mark();
  }

  get key() {
    return $("key").value;
  }

  get kind() {
    return $("kind").value || (this.chats ? "chat" : "text");
  }

  get system() {
    return $("system").value.trim();
  }

  /** The request's fields that the settings decide. */
  options(kind) {
    const body = { stream: true, stream_options: { include_usage: true }, return_progress: true, dflash: { return_steps: true } };
    for (const [id, name] of Object.entries(NUMBERS)) if (number(id) !== undefined) body[name] = number(id);
    if (kind === "text") body.max_tokens ??= TEXT_LIMIT;
    if ($("mode").value) body.dflash.mode = $("mode").value;
    if (number("budget") !== undefined) body.dflash.budget = number("budget");
    if (kind === "chat" && $("thinking").value) body.chat_template_kwargs = { enable_thinking: $("thinking").value === "on" };
    return body;
  }
}
