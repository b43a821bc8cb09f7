// Model text as DOM nodes: paragraphs, fenced code and inline code; never as HTML.

function paragraph(text) {
  const p = document.createElement("p");
  text.split(/(`[^`\n]+`)/).forEach((piece, i) => {
    if (!piece) return;
    if (i % 2) {
      const code = document.createElement("code");
      code.textContent = piece.slice(1, -1);
      p.append(code);
    } else {
      p.append(piece);
    }
  });
  return p;
}

export function render(box, text) {
  const nodes = [];
  text.split(/^```/m).forEach((part, i) => {
    if (i % 2) {
      const pre = document.createElement("pre");
      const code = document.createElement("code");
      code.textContent = part.slice(part.indexOf("\n") + 1); // behind the language's name
      pre.append(code);
      nodes.push(pre);
    } else {
      part.split(/\n{2,}/).filter((t) => t.trim()).forEach((t) => nodes.push(paragraph(t.replace(/^\n+|\n+$/g, ""))));
    }
  });
  box.replaceChildren(...nodes);
}
