// Formulas in TeX, between dollars or \( \) and \[ \], as MathML.

const SIZE = [40, 60]; // em: the widest and highest space that a formula may ask for

const RULES = {
  block: /^ {0,3}(?:\$\$([^$]+?)\$\$|\\\[([^]+?)\\\])[ \t]*(?:\n|$)/,
  // a dollar before a digit or a space is money, one before a letter is a shell's
  inline: /^(?:\\\(([^\n]+?)\\\)|\$\$([^$\n]+)\$\$|\\\[([^\n]+?)\\\]|\$(?![\s\d])((?:[^$\n\\]|\\.)*[^\s$\\]|\\.)\$(?!\w))/,
};

const STARTS = { block: /(?<=\n) {0,3}(?:\$\$|\\\[)/, inline: /\$|\\[([]/ };

function extension(level) {
  return {
    name: `${level}-formula`,
    level,
    start: (text) => text.match(STARTS[level])?.index,
    tokenizer(text) {
      const found = RULES[level].exec(text);
      if (!found) return undefined;
      const tex = found.slice(1).find((group) => group !== undefined).trim();
      const display = level === "block" || /^(?:\$\$|\\\[)/.test(found[0]);
      return { type: `${level}-formula`, raw: found[0], text: found[0].trim(), tex, display };
    },
  };
}

/** For the Markdown parser: it would eat their backslashes and underscores. */
export const formulas = [extension("block"), extension("inline")];

/** Writes the formula of a token into `box`: as it was written if it is not understood. */
export function formula(box, token) {
  box.className = "formula";
  try {
    globalThis.temml.render(token.tex, box, { displayMode: token.display, throwOnError: true, maxSize: SIZE });
  } catch {
    box.replaceChildren(token.text);
    box.classList.add("raw");
  }
  return box;
}
