// Draws the figures of a page, and follows a live run.
"use strict";

const FOLLOW_MS = 5000;
const CHANGING = ".facts, .alarms, .pages, .empty, table";
const CONFIG = { responsive: true, displaylogo: false, displayModeBar: false };

let plotly = null;

// Load plotly when the first figure needs it, after what is there already has been painted.
function loaded() {
  plotly ??= new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = document.documentElement.dataset.plotly;
    script.onload = resolve;
    requestAnimationFrame(() => setTimeout(() => document.head.append(script)));
  });
  return plotly;
}

async function draw(root) {
  for (const source of root.querySelectorAll("script[type='application/json'][data-for]")) {
    const target = document.getElementById(source.dataset.for);
    if (source.dataset.drawn || !target) continue;
    if (!window.Plotly) {
      sketch(target, JSON.parse(source.textContent));
      await loaded();
    }
    if (source.dataset.drawn || !target.isConnected) continue; // drawn or removed while plotly was loaded
    source.dataset.drawn = "1";
    const figure = JSON.parse(source.textContent);
    target.querySelector(".sketch")?.remove();
    Plotly.react(target, figure.data, figure.layout, CONFIG);
    document.dispatchEvent(new CustomEvent("drawn", { detail: target }));
  }
}

// Draw a figure when it comes near the window: a page has thirty, of which three are seen at first.
function drawWhenSeen() {
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        watcher.unobserve(entry.target);
        draw(entry.target);
      }
    }
  }, { rootMargin: "300px" });
  document.querySelectorAll("figure").forEach((figure) => watcher.observe(figure));
}

// Replace what changed, and leave figures where they are, so that their zoom stays.
function exchange(fresh) {
  const before = document.getElementById("content");
  const after = fresh.getElementById("content");
  if (!after || before.dataset.shape === undefined) before.dataset.shape = shapeOf(before);
  if (shapeOf(after) !== before.dataset.shape) {
    before.replaceWith(document.adoptNode(after));
    keepDrawings(before, after);
    drawWhenSeen();
    return;
  }
  const others = after.querySelectorAll(CHANGING);
  before.querySelectorAll(CHANGING).forEach((part, place) => {
    if (part.innerHTML !== others[place].innerHTML) part.innerHTML = others[place].innerHTML;
  });
  for (const source of after.querySelectorAll("script[data-for]")) {
    const target = document.getElementById(source.dataset.for);
    const old = before.querySelector(`script[data-for="${source.dataset.for}"]`);
    if (old.textContent === source.textContent) continue;
    old.textContent = source.textContent;
    if (old.dataset.drawn) {
      delete old.dataset.drawn;
      draw(target.closest("figure"));
    }
  }
}

// Move figures that are drawn already to their new place, by their title; those with other numbers are drawn again.
function keepDrawings(before, after) {
  const titled = (root) => new Map([...root.querySelectorAll("figure")].map((each) => [each.querySelector("h2").textContent, each]));
  const old = titled(before);
  for (const [title, figure] of titled(after)) {
    const source = figure.querySelector("script[data-for]");
    const oldSource = old.get(title)?.querySelector("script[data-drawn]");
    if (!oldSource) continue;
    const drawing = old.get(title).querySelector(".drawing");
    figure.querySelector(".drawing").replaceWith(drawing);
    drawing.id = source.dataset.for;
    if (source.textContent === oldSource.textContent) source.dataset.drawn = "1";
  }
}

function shapeOf(content) {
  const parts = [...content.querySelectorAll(`figure, ${CHANGING}`)];
  return parts.map((each) => each.tagName + each.className + (each.querySelector(".drawing")?.id ?? "")).join();
}

function isBusy() {
  const focus = document.activeElement;
  return document.hidden || (focus && /^(INPUT|SELECT|TEXTAREA)$/.test(focus.tagName) && focus.id !== "live");
}

// Fetch the page again, and show what changed; an error page is shown only if there is nothing else.
async function refreshed() {
  const answer = await fetch(location.href);
  if (answer.status === 401) throw new Error("another program, with another key, listens here now");
  if (answer.ok) exchange(new DOMParser().parseFromString(await answer.text(), "text/html"));
}

// Fill the frame that came while the run was read: first with what is there, then with what takes longer.
async function fillFrame() {
  const answer = await fetch(location.href, { headers: { "X-First": "1" } });
  exchange(new DOMParser().parseFromString(await answer.text(), "text/html"));
  if (document.querySelector("[data-more]")) await refreshed();
}

async function follow() {
  const box = document.getElementById("live");
  if (box?.checked && !isBusy()) {
    try {
      await refreshed();
    } catch {
      box.parentElement.classList.add("lost"); // the page's program has ended
    }
  }
  if (box) setTimeout(follow, FOLLOW_MS);
}

if (document.querySelector("[data-frame]")) fillFrame();
else drawWhenSeen();
setTimeout(follow, FOLLOW_MS);
