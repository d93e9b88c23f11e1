// Draws the lines of a figure at once. Plotly takes their place when its 5 MB are compiled, a second later.
"use strict";

const MARGIN = { left: 52, right: 12, top: 10, bottom: 40 };
const LEGEND_PX = 22;
const TICKS = 5;

function sketch(target, figure) {
  const layout = figure.layout;
  const lines = stacked(figure.data.filter((line) => line.x?.length));
  const all = (name) => lines.flatMap((line) => line[name]);
  if (!figure.is_lines || !all("x").length) return;
  const width = target.clientWidth, height = layout.height;
  const top = MARGIN.top + (layout.showlegend ? LEGEND_PX : 0);
  const x = scale(all("x"), null, MARGIN.left, width - MARGIN.right, 0);
  const y = scale([...all("y"), ...all("base")], layout.yaxis.range, height - MARGIN.bottom, top, 0.05);
  const drawing = shape("svg", { width, height, "font-size": layout.font.size, fill: layout.font.color, class: "sketch" });
  for (const at of y.ticks) {
    drawing.append(shape("path", { d: `M${MARGIN.left},${y(at)}H${width - MARGIN.right}`, stroke: layout.yaxis.gridcolor }));
    drawing.append(words(shown(at, layout.yaxis), { x: MARGIN.left - 4, y: y(at) + 4, "text-anchor": "end" }));
  }
  for (const at of x.ticks) drawing.append(words(shown(at), { x: x(at), y: height - 22, "text-anchor": "middle" }));
  drawing.append(words(layout.xaxis.title.text, { x: (MARGIN.left + width) / 2, y: height - 6, "text-anchor": "middle" }));
  drawing.append(words(layout.yaxis.title.text, { transform: `translate(11 ${(top + height - MARGIN.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }));
  let legend = MARGIN.left;
  for (const line of lines) {
    const points = line.x.map((at, place) => `${x(at).toFixed(1)},${y(line.y[place]).toFixed(1)}`);
    const floor = line.base.map((at, place) => `${x(line.x[place]).toFixed(1)},${y(at).toFixed(1)}`).reverse();
    const colour = line.line.color;
    if (floor.length) drawing.append(shape("path", { d: `M${points.join("L")}L${floor.join("L")}Z`, fill: colour, "fill-opacity": 0.5 }));
    const dash = line.line.dash === "dot" ? "2 3" : "none";
    const isPoint = points.length === 1;
    drawing.append(shape("path", { d: `M${points.join("L")}${isPoint ? "h0" : ""}`, fill: "none", stroke: colour, "stroke-width": isPoint ? 6 : line.line.width, "stroke-linecap": isPoint ? "round" : "butt", "stroke-dasharray": dash }));
    if (!layout.showlegend) continue;
    drawing.append(shape("path", { d: `M${legend},14h18`, stroke: colour, "stroke-width": 2, "stroke-dasharray": dash }));
    drawing.append(words(line.name, { x: legend + 22, y: 18 }));
    legend += 36 + line.name.length * 6.5;
  }
  target.replaceChildren(drawing);
}

// Add to each area those below it, as plotly does.
function stacked(lines) {
  const sums = new Map();
  return lines.map((line) => {
    if (!line.stackgroup) return { ...line, base: [] };
    const base = line.x.map((at) => sums.get(at) ?? 0);
    const y = line.y.map((value, place) => value + base[place]);
    line.x.forEach((at, place) => sums.set(at, y[place]));
    return { ...line, y, base };
  });
}

// Return the function from a number to its place between two pixels, with round numbers in its range as ``ticks``.
function scale(numbers, range, from, to, room) {
  let [low, high] = range ?? numbers.reduce(([least, most], each) => [Math.min(least, each), Math.max(most, each)], [Infinity, -Infinity]);
  if (low === high) [low, high] = [low - 1, high + 1];
  else if (!range) [low, high] = [low - room * (high - low), high + room * (high - low)];
  const place = (number) => from + ((number - low) / (high - low)) * (to - from);
  const power = 10 ** Math.floor(Math.log10((high - low) / TICKS));
  const width = [1, 2, 5, 10].map((each) => each * power).find((each) => (high - low) / each <= TICKS) ?? 10 * power;
  place.ticks = [];
  for (let at = Math.ceil(low / width); at * width <= high; at++) place.ticks.push(at * width);
  return place;
}

function shown(number, axis) {
  if (axis?.tickformat === ".0%") return `${Math.round(number * 100)}%`;
  return Math.abs(number) >= 10_000 ? `${Number((number / 1000).toPrecision(6))}k` : `${Number(number.toPrecision(6))}`;
}

function shape(kind, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function words(text, attributes) {
  const made = shape("text", attributes);
  made.textContent = text;
  return made;
}
