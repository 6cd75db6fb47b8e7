// The Markdown that models write, as elements: no HTML of an answer reaches the page.

import { copyButton } from "./copy.js";

export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

// Blocks: fenced code, headings, lists, quotes, paragraphs. What is not finished is shown as far
// as it is there.
export function render(text) {
  const lines = text.split("\n");
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const fence = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/.exec(line);
    const heading = /^(#{1,6})\s+(.*)/.exec(line);
    if (fence) {
      const begin = (at += 1);
      while (at < lines.length && !lines[at].trim().startsWith(fence[1])) at += 1;
      found.push(code(lines.slice(begin, at).join("\n"), fence[2]));
      at += 1;
    } else if (heading) {
      found.push(inlineInto(element(`h${Math.min(6, heading[1].length + 3)}`), heading[2]));
      at += 1;
    } else if (marker(line)) {
      const begin = at;
      while (at < lines.length && (marker(lines[at]) || /^\s+\S/.test(lines[at]))) at += 1;
      found.push(list(lines.slice(begin, at)));
    } else if (line.trim() === "") {
      at += 1;
    } else {
      const begin = at;
      while (at < lines.length && lines[at].trim() !== "" && !isBlock(lines[at], at > begin)) {
        at += 1;
      }
      found.push(inlineInto(element("p"), lines.slice(begin, at).join("\n")));
    }
  }
  return found;
}

const isBlock = (line, isLater) =>
  isLater && (/^\s*(`{3,}|~{3,})/.test(line) || /^#{1,6}\s/.test(line) || marker(line) !== null);

const marker = (line) => /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)/.exec(line);

function list(lines) {
  const isOrdered = /\d/.test(marker(lines[0])[2]);
  const made = element(isOrdered ? "ol" : "ul");
  if (isOrdered) made.start = parseInt(marker(lines[0])[2], 10);
  const indent = marker(lines[0])[1].length;
  for (let at = 0; at < lines.length; ) {
    const item = element("li");
    const found = marker(lines[at]);
    inlineInto(item, found ? found[3] : lines[at].trim());
    const begin = (at += 1);
    while (at < lines.length && /^\s*/.exec(lines[at])[0].length > indent) at += 1;
    const inner = lines.slice(begin, at);
    if (inner.length && marker(inner[0])) item.append(list(inner));
    else if (inner.length) inlineInto(item, ` ${inner.map((line) => line.trim()).join(" ")}`);
    made.append(item);
  }
  return made;
}

function code(text, language) {
  const made = element("figure", "code");
  const head = element("figcaption", "", language || "text");
  head.append(copyButton("plain", () => text));
  const pre = element("pre");
  pre.tabIndex = 0;
  pre.append(element("code", "", text));
  made.append(head, pre);
  return made;
}

// Inline: code, bold, italics. Links are left as text: an answer is not to be trusted with one.
const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=\S)([^*\n]*?\S)\*/g;

function inlineInto(parent, text) {
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    parent.append(text.slice(end, match.index));
    if (match[2] !== undefined) parent.append(element("code", "", match[2]));
    else if (match[3] !== undefined) parent.append(inlineInto(element("strong"), match[3]));
    else parent.append(inlineInto(element("em"), match[4]));
    end = match.index + match[0].length;
  }
  parent.append(text.slice(end));
  return parent;
}
