// Fetches the finer data when the timeline is zoomed, and follows the reading of its files.
"use strict";

const READING_MS = 1000;
const SETTLED_MS = 150; // zooming sends several events

const timeline = document.getElementById("timeline");
let newest = 0;
let waiting = null;
let isReset = false;

document.addEventListener("drawn", ({ detail }) => {
  if (detail !== timeline || timeline.dataset.listens) return;
  timeline.dataset.listens = "1";
  timeline.on("plotly_relayout", zoomed);
  timeline.on("plotly_doubleclick", () => show(new URLSearchParams(), true));
});

function zoomed(change) {
  const range = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  if (range[0] === undefined || isReset) return; // after two clicks, plotly goes back to the window it first had
  const digits = range[1] - range[0] < 1 ? 4 : 2;
  const [from, to] = range.map((at) => Number(at).toFixed(digits));
  show(new URLSearchParams({ from, to }));
}

// Show another part of the same timeline, and put it into the address.
function show(query, isWhole = false) {
  isReset = isWhole;
  const file = new URLSearchParams(location.search).get("timeline");
  if (file) query.set("timeline", file);
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    isReset = false;
    history.replaceState(null, "", query.size ? "?" + query : location.pathname);
    refresh();
  }, SETTLED_MS);
}

async function refresh() {
  const mine = ++newest;
  let shown = null;
  try {
    const answer = await fetch(location.pathname + "/data/spans" + location.search);
    if (answer.ok) shown = await answer.json();
  } catch {
    // the page's program has ended
  }
  if (mine !== newest) return; // a later zoom is on its way
  if (shown === null) document.getElementById("progress").textContent = "The page's program does not answer any more.";
  else {
    await loaded();
    fill(shown);
  }
}

function fill(shown) {
  const progress = document.getElementById("progress");
  if (progress.textContent !== shown.progress) progress.textContent = shown.progress;
  document.querySelector(".facts").replaceChildren(...shown.facts.map(([name, value]) => {
    const box = document.createElement("div");
    box.append(element("dt", name), element("dd", value));
    return box;
  }));
  document.querySelector("#totals tbody").replaceChildren(...shown.rows.map((row) => {
    const line = document.createElement("tr");
    line.append(...row.map((text, place) => element(place ? "td" : "th", text, place > 1 ? "number" : "")));
    line.firstChild.scope = "row";
    return line;
  }));
  for (const link of document.querySelectorAll("[data-link]")) link.href = shown.links[link.dataset.link];
  Plotly.react(timeline, shown.figure.data, shown.figure.layout, CONFIG);
  if (shown.is_reading) setTimeout(refresh, READING_MS);
}

function element(kind, text, name = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  if (name) made.className = name;
  return made;
}

if (document.getElementById("progress")?.dataset.reading !== undefined) setTimeout(refresh, READING_MS);
