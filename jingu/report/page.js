// Shows the values of the step under the pointer (or under the arrow keys) in each chart's caption.
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const { left, right, top, bottom, last, series, colours, names } = JSON.parse(figure.dataset.chart);
  const svg = figure.querySelector("svg");
  const values = [...figure.querySelectorAll(".value")], resting = values.map((value) => value.textContent);
  const make = (name, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return svg.appendChild(node);
  };
  const line = make("line", { class: "cross", y1: top, y2: bottom, visibility: "hidden" });
  const at = make("text", { class: "at", y: bottom + 22, "text-anchor": "middle", visibility: "hidden" });
  const dots = colours.map((colour) => make("circle", { class: "spot s" + colour, r: 4, visibility: "hidden" }));
  const steps = [...new Set(series.flat().map((point) => point[0]))].sort((a, b) => a - b);
  const nearest = (list, step, of) => list.reduce((best, item) => Math.abs(of(item) - step) < Math.abs(of(best) - step) ? item : best);
  let here = null;
  const show = (step) => {
    here = nearest(steps, step, (item) => item);
    const x = left + here / last * (right - left);
    line.setAttribute("x1", x); line.setAttribute("x2", x); line.setAttribute("visibility", "visible");
    at.setAttribute("x", Math.min(x, right - 28));
    at.textContent = names ? names[here - 1] : "step " + here.toLocaleString("en"); at.setAttribute("visibility", "visible");
    series.forEach((points, index) => {
      if (!points.length) return;
      const [step, text, y] = nearest(points, here, (point) => point[0]);
      values[index].textContent = text;
      dots[index].setAttribute("cx", left + step / last * (right - left)); dots[index].setAttribute("cy", y);
      dots[index].setAttribute("visibility", "visible");
    });
  };
  const hide = () => {
    here = null;
    values.forEach((value, index) => { value.textContent = resting[index]; });
    for (const node of [line, at, ...dots]) node.setAttribute("visibility", "hidden");
  };
  svg.addEventListener("pointermove", (event) => {
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    show((x - left) / (right - left) * last);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const index = here === null ? (way > 0 ? 0 : steps.length - 1) : steps.indexOf(here) + way;
    show(steps[Math.min(Math.max(index, 0), steps.length - 1)]);
  });
}
addEventListener("beforeprint", () => { for (const details of document.querySelectorAll("details")) details.open = true; });
