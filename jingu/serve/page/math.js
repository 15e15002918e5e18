// Formulas. The server converts LaTeX to MathML, which browsers show themselves. A formula is text until it is converted,
// and stays text if it cannot be.

import { headers } from "./stream.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const TAGS = new Set(
  ("math mrow mi mn mo ms mtext mspace msup msub msubsup mfrac msqrt mroot mover munder munderover mmultiscripts " +
    "mprescripts none mtable mtr mtd mpadded mphantom menclose mstyle").split(" "),
);
const ATTRIBUTES = new Set(
  ("display displaystyle scriptlevel mathvariant stretchy accent accentunder linethickness columnalign columnlines rowlines " +
    "columnspacing rowspacing width height depth lspace rspace voffset fence form separator largeop movablelimits symmetric " +
    "minsize maxsize notation").split(" "),
);

/** Converted formulas by their key: a tree, or null if there is none. */
const trees = new Map();
/** Nodes that wait for their formulas, by key. */
const waiting = new Map();

/** Return a node that shows a formula. `source` is its text with the marks around it. */
export function formula(latex, isBlock, source) {
  const node = document.createElement(isBlock ? "div" : "span");
  node.className = "math";
  node.textContent = source;
  const key = `${isBlock ? "block" : "inline"}:${latex}`;
  if (trees.has(key)) show(node, trees.get(key));
  else {
    if (!waiting.size) queueMicrotask(convert);
    if (!waiting.has(key)) waiting.set(key, { latex, display: isBlock ? "block" : "inline", nodes: [] });
    waiting.get(key).nodes.push(node);
  }
  return node;
}

/** Convert all formulas that wait, in one request. */
async function convert() {
  const batch = [...waiting.entries()].slice(0, 64);
  for (const [key] of batch) waiting.delete(key);
  if (waiting.size) queueMicrotask(convert);
  const formulas = batch.map(([, { latex, display }]) => ({ latex, display }));
  try {
    const key = sessionStorage.getItem("jingu.key");
    const response = await fetch("math", { method: "POST", headers: headers(key), body: JSON.stringify({ formulas }) });
    const results = response.ok ? (await response.json()).formulas : [];
    batch.forEach(([key, { nodes }], place) => {
      if (response.ok) trees.set(key, results[place] ?? null);
      for (const node of nodes) show(node, results[place]);
    });
  } catch {
    // The formulas stay text.
  }
}

function show(node, tree) {
  if (!tree) return;
  const math = build(tree);
  math.setAttribute("title", node.textContent);
  node.replaceChildren(math);
}

/** Build an element from [name, attributes, children]; only MathML that cannot load or run anything. */
function build([name, attributes, children]) {
  const node = document.createElementNS(MATHML, TAGS.has(name) ? name : "mrow");
  for (const [key, value] of Object.entries(attributes)) if (ATTRIBUTES.has(key)) node.setAttribute(key, value);
  node.append(...children.map((child) => (typeof child === "string" ? child : build(child))));
  return node;
}
