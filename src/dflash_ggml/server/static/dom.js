// Small helpers for building the page: elements, icons, the clipboard, short notices.

const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  copy: "M9 9h10v10H9zM5 15V5h10",
  done: "M5 13l4 4L19 7",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  again: "M19 12a7 7 0 1 1-2-5l2 2M19 4v5h-5",
  further: "M5 5v14M10 12h10M15 7l5 5-5 5",
  remove: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  tree: "M4 12h5l5-6h6M9 12l5 6h6",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  up: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  clip: "M20 11l-8 8a5 5 0 0 1-7-7l8-8a3.5 3.5 0 0 1 5 5l-8 8a2 2 0 0 1-3-3l7-7",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  close: "M6 6l12 12M18 6L6 18",
  settings: "M4 7h9M19 7h1M4 17h1M11 17h9M13 7a3 3 0 1 0 6 0 3 3 0 1 0-6 0M5 17a3 3 0 1 0 6 0 3 3 0 1 0-6 0",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  file: "M7 3h7l4 4v14H7zM14 3v4h4",
};

export const $ = (id) => document.getElementById(id);

/** An element. `props`: attributes; text, and functions as listeners ("click") are set apart. */
export function make(name, props = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(props)) {
    if (key === "text") node.textContent = value;
    else if (typeof value === "function") node.addEventListener(key, value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== undefined && value !== null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", `icon ${name}`);
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button of one icon; `label` is its name and tooltip. */
export function iconButton(name, label, click, props = {}) {
  return make("button", { type: "button", class: "icon-button", "aria-label": label, title: label, click, ...props }, icon(name));
}

/** Puts the icons into buttons of the document that ask for one by data-icon. */
export function dressButtons() {
  for (const node of document.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));
}

/** Copies text, on pages without a secure origin too, and shows on the button that it did. */
export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const old = button.querySelector("svg");
  if (!old || old.classList.contains("done")) return;
  const tick = icon("done");
  old.replaceWith(tick);
  say("Copied");
  setTimeout(() => tick.replaceWith(old), 1200);
}

/** Tells screen readers; nothing is shown. */
export function say(text) {
  $("spoken").textContent = text;
}

let hiding = 0;

/** A line at the bottom for some seconds, with one thing to do about it. */
export function toast(text, action = "", act = null) {
  const box = $("toast");
  const close = () => { box.hidden = true; };
  box.replaceChildren(make("span", { text }));
  if (act) box.append(make("button", { type: "button", text: action, click: () => { close(); act(); } }));
  box.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(close, act ? 8000 : 4000);
}

/** Lets the reader save `text` as a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
