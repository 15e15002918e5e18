// Markdown to DOM nodes. Text only ever becomes text nodes, so nothing that a model writes is executed or fetched:
// there is no HTML, images become links, and links lead only to http, https and mailto addresses.

import { formula } from "./math.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(?=\S)|\s*$)/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
// A formula that begins a line. Its end can be some lines below.
const FORMULA = /^ {0,3}(?:\$\$|\\\[)/;
// Text between two prices, such as "5 apples and US".
const PRICES = /^\d[^\\^_=+*<>{}/]*\s[^\\^_=+*<>{}/]*$/;
const TASK = /^\[([ xX])\]\s+/;
const MAX_DEPTH = 12;

// Spans have a maximum length, so that many unclosed marks stay cheap.
const INLINE = new RegExp(
  [
    /\\\((?<round>[^]{1,2000}?)\\\)|\\\[(?<square>[^]{1,2000}?)\\\]|\$\$(?<dollars>[^$]{1,2000})\$\$/,
    // As in Pandoc: spaces or digits beside a dollar sign mean that it stands for a price.
    /(?<![\\$\p{L}\p{N}])\$(?<dollar>(?![\s$])(?:[^$\n\\]|\\[^\n]){0,1999}?[^$\n\\\s]|[^$\s\\])\$(?![\d$])/,
    /\\(?<escaped>[\\`*_{}[\]#+\-.!|~<>$()])/,
    /(?<ticks>`+)(?<code>[^`]|[^`][^]{0,4000}?[^`])\k<ticks>(?!`)/,
    /!?\[(?<label>[^\]\n]{0,400})\]\(\s*<?(?<address>[^\s)>]{1,2000})>?(?:\s+"[^"\n]{0,400}")?\s*\)/,
    /(?<bare>https?:\/\/(?:\([^\s<>"'`()]*\)|[^\s<>"'`()，。；：！？、（）]){1,2000}(?<![.,;:!?\]*_~]))/,
    /\*\*\*(?=\S)(?<both>[^]{0,2000}?\S)\*\*\*/,
    /(?<strong>\*\*|__)(?=\S)(?<bold>[^]{0,2000}?\S)\k<strong>/,
    /~~(?=\S)(?<struck>[^]{0,2000}?\S)~~/,
    /\*(?=[^\s*])(?<star>[^]{0,2000}?[^\s*])\*(?!\*)/,
    /(?<![\p{L}\p{N}_])_(?=[^\s_])(?<line>[^]{0,2000}?[^\s_])_(?![\p{L}\p{N}_])/,
    /(?<newline>\n)/,
  ].map((part) => part.source).join("|"),
  "gu",
);

/** Create an element with children, which are nodes or texts. */
export function element(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

/** Render Markdown into `place`. Blocks that already exist, from a shorter text, are reused. */
export function showMarkdown(place, text, strings) {
  const parsed = blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
  parsed.forEach((block, number) => {
    const old = place.children[number];
    if (old?.source === block.source && old?.kind === block.kind) return;
    if (block.kind === "code" && old?.kind === "code" && old.language === block.language) {
      old.querySelector("code").textContent = block.text;
      old.source = block.source;
      return;
    }
    const node = Object.assign(render(block, strings), { source: block.source, kind: block.kind, language: block.language });
    if (old) old.replaceWith(node);
    else place.append(node);
  });
  while (place.children.length > parsed.length) place.lastElementChild.remove();
}

/** Parse lines into blocks, item with its source text. */
function blocks(lines, depth) {
  const result = [];
  let at = 0;
  const push = (kind, from, more) => result.push({ kind, source: lines.slice(from, at).join("\n"), ...more });
  while (at < lines.length) {
    const from = at;
    const line = lines[at];
    const fence = line.match(FENCE);
    const heading = line.match(HEADING);
    if (!line.trim()) {
      at++;
    } else if (fence) {
      const end = new RegExp(`^ {0,3}\\${fence[1][0]}{${fence[1].length},}\\s*$`);
      for (at++; at < lines.length && !end.test(lines[at]); at++);
      push("code", from, { language: fence[2], text: lines.slice(from + 1, at++).join("\n") });
    } else if (FORMULA.test(line) && (at = formulaEnd(lines, from)) > from) {
      push("formula", from, { text: lines.slice(from, at).join("\n").trim() });
    } else if (heading) {
      at++;
      push("heading", from, { level: heading[1].length, text: heading[2] });
    } else if (RULE.test(line)) {
      at++;
      push("rule", from);
    } else if (depth < MAX_DEPTH && QUOTE.test(line)) {
      while (at < lines.length && lines[at].trim() && !(at > from && starts(lines, at) && !QUOTE.test(lines[at]))) at++;
      push("quote", from, { inner: blocks(lines.slice(from, at).map((item) => item.replace(QUOTE, "")), depth + 1) });
    } else if (depth < MAX_DEPTH && ITEM.test(line)) {
      const items = [];
      at = list(lines, at, items, depth);
      const number = parseInt(line.match(ITEM)[2], 10);
      push("list", from, { items, number });
    } else if (isTable(lines, at)) {
      const ends = lines[at + 1].trim().replace(/^\||\|$/g, "").split("|").map((item) => item.trim());
      const sides = ends.map((item) => (item.endsWith(":") ? (item.startsWith(":") ? "center" : "right") : ""));
      for (at += 2; at < lines.length && lines[at].includes("|"); at++);
      const rows = [line, ...lines.slice(from + 2, at)].map(cells);
      push("table", from, { rows, sides });
    } else {
      for (at++; at < lines.length && lines[at].trim() && !starts(lines, at); at++);
      push("paragraph", from, { text: lines.slice(from, at).map((item) => item.trim()).join("\n") });
    }
  }
  return result;
}

/** Return the line after a formula that begins at a line and ends at the end of one; the same line if there is none. */
function formulaEnd(lines, at) {
  const close = lines[at].includes("$$") ? "$$" : "\\]";
  for (let end = at; end < Math.min(lines.length, at + 100); end++) {
    const text = end === at ? lines[end].trim().slice(2) : lines[end].trim();
    if (text.includes(close)) return text.endsWith(close) && text.indexOf(close) === text.length - 2 ? end + 1 : at;
  }
  return at;
}

/** Return whether a block other than a paragraph starts at this line. */
function starts(lines, at) {
  if (FORMULA.test(lines[at]) && formulaEnd(lines, at) > at) return true;
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(lines[at])) || isTable(lines, at);
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && DIVIDER.test(lines[at + 1]);
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((item) => item.trim().replaceAll("\\|", "|"));
}

/** Collect the items of a list; return the line after it. */
function list(lines, at, items, depth) {
  const [, margin, mark] = lines[at].match(ITEM);
  while (at < lines.length) {
    const next = lines[at].match(ITEM);
    if (!next || RULE.test(lines[at]) || next[1].length > margin.length + 1 || next[2].at(-1) !== mark.at(-1)) break;
    const indent = Math.min(next[0].length, next[1].length + next[2].length + 4);
    const inner = [lines[at].slice(next[0].length)];
    let fenced = FENCE.test(inner[0]);
    for (at++; at < lines.length; at++) {
      const line = lines[at];
      const isIndented = line.slice(0, indent).trim() === "";
      const blank = !line.trim();
      const following = lines.slice(at).find((item) => item.trim());
      if (blank && !(following && /^\s{2,}/.test(following)) && !fenced) break;
      if (!blank && !isIndented && !fenced) {
        const deeper = line.match(ITEM);
        if (deeper ? deeper[1].length <= margin.length + 1 : starts(lines, at) || !lines[at - 1].trim()) break;
      }
      if (FENCE.test(line.trim())) fenced = !fenced;
      inner.push(isIndented ? line.slice(indent) : line.trimStart());
    }
    items.push(blocks(inner, depth + 1));
    const after = at;
    while (at < lines.length && !lines[at].trim()) at++;
    if (at === lines.length || !ITEM.test(lines[at])) return after;
  }
  return at;
}

function render(block, strings) {
  const all = (inner) => inner.map((item) => render(item, strings));
  switch (block.kind) {
    case "code":
      return renderCode(block, strings);
    case "formula":
      return formula(block.text.slice(2, -2), true, block.text);
    case "heading":
      return element(`h${Math.min(6, block.level + 2)}`, { dir: "auto" }, inline(block.text));
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", { dir: "auto" }, ...all(block.inner));
    case "list": {
      const ordered = !Number.isNaN(block.number);
      const items = block.items.map((inner) => renderItem(inner, strings));
      return element(ordered ? "ol" : "ul", { dir: "auto", ...(ordered && { start: block.number }) }, ...items);
    }
    case "table":
      return renderTable(block);
    default:
      return element("p", { dir: "auto" }, inline(block.text));
  }
}

/** Render a list item: if it begins with a paragraph, its text gets no <p>. A task begins with a box. */
function renderItem(inner, strings) {
  const rest = inner.filter((item, number) => number > 0 || item.kind !== "paragraph");
  const text = rest.length < inner.length ? inner[0].text : null;
  const task = text?.match(TASK);
  const box = task && element("input", { type: "checkbox", checked: task[1] !== " ", disabled: true });
  const first = text === null ? [] : [inline(task ? text.slice(task[0].length) : text)];
  return element("li", { className: task ? "task" : "" }, ...(box ? [box] : []), ...first, ...rest.map((item) => render(item, strings)));
}

function renderCode(block, strings) {
  const code = element("code", {}, block.text);
  const copy = element("button", { type: "button", className: "copy", ariaLabel: strings.copyCode, hidden: !navigator.clipboard }, strings.copy);
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(code.textContent);
    copy.textContent = strings.copied;
    setTimeout(() => (copy.textContent = strings.copy), 1500);
  });
  const bar = element("div", { className: "code-bar" }, element("span", {}, block.language || strings.code), copy);
  const pre = element("pre", { tabIndex: 0, ariaLabel: block.language || strings.code }, code);
  pre.setAttribute("role", "region");
  return element("div", { className: "code" }, bar, pre);
}

function renderTable({ rows, sides }) {
  const width = rows[0].length;
  const row = (name) => (texts) =>
    element("tr", {}, ...Array.from({ length: width }, (_, place) =>
      element(name, { className: sides[place] ?? "" }, inline(texts[place] ?? ""))));
  const [head, ...body] = rows;
  const table = element("table", { dir: "auto" }, element("thead", {}, row("th")(head)), element("tbody", {}, ...body.map(row("td"))));
  return element("div", { className: "table" }, table);
}

/** Render the inline marks of a text. */
function inline(text, depth = 0) {
  const fragment = document.createDocumentFragment();
  if (depth > MAX_DEPTH) {
    fragment.append(text);
    return fragment;
  }
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    fragment.append(text.slice(end, match.index));
    end = match.index + match[0].length;
    const part = match.groups;
    const latex = part.round ?? part.square ?? part.dollars ?? part.dollar;
    if (part.dollar && PRICES.test(part.dollar)) fragment.append(match[0]);
    else if (latex !== undefined) fragment.append(formula(latex, part.square !== undefined || part.dollars !== undefined, match[0]));
    else if (part.escaped) fragment.append(part.escaped);
    else if (part.code !== undefined) fragment.append(element("code", {}, part.code.replace(/^ (.*[^ ].*) $/s, "$1")));
    else if (part.address) fragment.append(link(part.address, inline(part.label || part.address, depth + 1), match[0]));
    else if (part.bare) fragment.append(link(part.bare, part.bare, part.bare));
    else if (part.both) fragment.append(element("em", {}, element("strong", {}, inline(part.both, depth + 1))));
    else if (part.bold) fragment.append(element("strong", {}, inline(part.bold, depth + 1)));
    else if (part.struck) fragment.append(element("del", {}, inline(part.struck, depth + 1)));
    else if (part.newline) fragment.append(element("br"));
    else fragment.append(element("em", {}, inline(part.star ?? part.line, depth + 1)));
  }
  fragment.append(text.slice(end));
  return fragment;
}

function link(address, label, source) {
  const url = URL.parse?.(address) ?? (URL.canParse(address) ? new URL(address) : null);
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return document.createTextNode(source);
  return element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, label);
}
