// Markdown to DOM nodes. Text only ever becomes text nodes, so nothing that a model writes is run or fetched: there is
// no HTML, images are links, and links go to http, https and mailto addresses alone.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(?=\S)|\s*$)/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 12;

// Spans have an upper length, so that many unclosed marks cost little.
const INLINE = new RegExp(
  [
    /\\(?<escaped>[\\`*_{}[\]#+\-.!|~<>])/,
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

/** A new element with children, nodes or texts. */
export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** Show Markdown in `place`. Blocks that are there already, from a shorter text, stay as they are. */
export function show(place, text, words) {
  const wanted = blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
  wanted.forEach((block, number) => {
    const old = place.children[number];
    if (old?.source === block.source && old?.kind === block.kind) return;
    if (block.kind === "code" && old?.kind === "code" && old.language === block.language) {
      old.querySelector("code").textContent = block.text;
      old.source = block.source;
      return;
    }
    const made = Object.assign(draw(block, words), { source: block.source, kind: block.kind, language: block.language });
    if (old) old.replaceWith(made);
    else place.append(made);
  });
  while (place.children.length > wanted.length) place.lastElementChild.remove();
}

/** The blocks of some lines, each with the text that it was made of. */
function blocks(lines, depth) {
  const found = [];
  let at = 0;
  const take = (kind, from, more) => found.push({ kind, source: lines.slice(from, at).join("\n"), ...more });
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
      take("code", from, { language: fence[2], text: lines.slice(from + 1, at++).join("\n") });
    } else if (heading) {
      at++;
      take("heading", from, { level: heading[1].length, text: heading[2] });
    } else if (RULE.test(line)) {
      at++;
      take("rule", from);
    } else if (depth < DEEPEST && QUOTE.test(line)) {
      while (at < lines.length && lines[at].trim() && !(at > from && starts(lines, at) && !QUOTE.test(lines[at]))) at++;
      take("quote", from, { inner: blocks(lines.slice(from, at).map((each) => each.replace(QUOTE, "")), depth + 1) });
    } else if (depth < DEEPEST && ITEM.test(line)) {
      const items = [];
      at = list(lines, at, items, depth);
      const number = parseInt(line.match(ITEM)[2], 10);
      take("list", from, { items, number });
    } else if (isTable(lines, at)) {
      const ends = lines[at + 1].trim().replace(/^\||\|$/g, "").split("|").map((each) => each.trim());
      const sides = ends.map((each) => (each.endsWith(":") ? (each.startsWith(":") ? "center" : "right") : ""));
      for (at += 2; at < lines.length && lines[at].includes("|"); at++);
      const rows = [line, ...lines.slice(from + 2, at)].map(cells);
      take("table", from, { rows, sides });
    } else {
      for (at++; at < lines.length && lines[at].trim() && !starts(lines, at); at++);
      take("paragraph", from, { text: lines.slice(from, at).map((each) => each.trim()).join("\n") });
    }
  }
  return found;
}

/** Whether another block than a paragraph starts here. */
function starts(lines, at) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(lines[at])) || isTable(lines, at);
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && DIVIDER.test(lines[at + 1]);
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((each) => each.trim().replaceAll("\\|", "|"));
}

/** Gather the items of a list; returns the line after it. */
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
      const inside = line.slice(0, indent).trim() === "";
      const blank = !line.trim();
      const follows = lines.slice(at).find((each) => each.trim());
      if (blank && !(follows && /^\s{2,}/.test(follows)) && !fenced) break;
      if (!blank && !inside && !fenced) {
        const deeper = line.match(ITEM);
        if (deeper ? deeper[1].length <= margin.length + 1 : starts(lines, at) || !lines[at - 1].trim()) break;
      }
      if (FENCE.test(line.trim())) fenced = !fenced;
      inner.push(inside ? line.slice(indent) : line.trimStart());
    }
    items.push(blocks(inner, depth + 1));
    const after = at;
    while (at < lines.length && !lines[at].trim()) at++;
    if (at === lines.length || !ITEM.test(lines[at])) return after;
  }
  return at;
}

function draw(block, words) {
  const all = (inner) => inner.map((each) => draw(each, words));
  switch (block.kind) {
    case "code":
      return drawCode(block, words);
    case "heading":
      return element(`h${Math.min(6, block.level + 2)}`, {}, inline(block.text));
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, ...all(block.inner));
    case "list": {
      const ordered = !Number.isNaN(block.number);
      const items = block.items.map((inner) => element("li", {}, ...tight(inner, words)));
      return element(ordered ? "ol" : "ul", ordered ? { start: block.number } : {}, ...items);
    }
    case "table":
      return drawTable(block);
    default:
      return element("p", {}, inline(block.text));
  }
}

/** An item of a single paragraph, and what may follow it, has no paragraph around its text. */
function tight(inner, words) {
  const rest = inner.filter((each, number) => number > 0 || each.kind !== "paragraph");
  const first = rest.length < inner.length ? [inline(inner[0].text)] : [];
  return [...first, ...rest.map((each) => draw(each, words))];
}

function drawCode(block, words) {
  const code = element("code", {}, block.text);
  const copy = element("button", { type: "button", className: "copy", ariaLabel: words.copyCode, hidden: !navigator.clipboard }, words.copy);
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(code.textContent);
    copy.textContent = words.copied;
    setTimeout(() => (copy.textContent = words.copy), 1500);
  });
  const bar = element("div", { className: "code-bar" }, element("span", {}, block.language || words.code), copy);
  const pre = element("pre", { tabIndex: 0, ariaLabel: block.language || words.code }, code);
  pre.setAttribute("role", "region");
  return element("div", { className: "code" }, bar, pre);
}

function drawTable({ rows, sides }) {
  const width = rows[0].length;
  const row = (name) => (texts) =>
    element("tr", {}, ...Array.from({ length: width }, (_, place) =>
      element(name, { className: sides[place] ?? "" }, inline(texts[place] ?? ""))));
  const [head, ...body] = rows;
  const table = element("table", {}, element("thead", {}, row("th")(head)), element("tbody", {}, ...body.map(row("td"))));
  return element("div", { className: "table" }, table);
}

/** What stands in a line. */
function inline(text, depth = 0) {
  const made = document.createDocumentFragment();
  if (depth > DEEPEST) {
    made.append(text);
    return made;
  }
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    made.append(text.slice(end, match.index));
    end = match.index + match[0].length;
    const part = match.groups;
    if (part.escaped) made.append(part.escaped);
    else if (part.code !== undefined) made.append(element("code", {}, part.code.replace(/^ (.*[^ ].*) $/s, "$1")));
    else if (part.address) made.append(link(part.address, inline(part.label || part.address, depth + 1), match[0]));
    else if (part.bare) made.append(link(part.bare, part.bare, part.bare));
    else if (part.both) made.append(element("em", {}, element("strong", {}, inline(part.both, depth + 1))));
    else if (part.bold) made.append(element("strong", {}, inline(part.bold, depth + 1)));
    else if (part.struck) made.append(element("del", {}, inline(part.struck, depth + 1)));
    else if (part.newline) made.append(element("br"));
    else made.append(element("em", {}, inline(part.star ?? part.line, depth + 1)));
  }
  made.append(text.slice(end));
  return made;
}

function link(address, shown, written) {
  const url = URL.parse?.(address) ?? (URL.canParse(address) ? new URL(address) : null);
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return document.createTextNode(written);
  return element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, shown);
}
