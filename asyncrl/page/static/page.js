// Draws the figures of a page, and follows a live run.
"use strict";

const FOLLOW_MS = 5000;
const CONFIG = { responsive: true, displaylogo: false, displayModeBar: false };

function draw(root) {
  for (const source of root.querySelectorAll("script[type='application/json'][data-for]")) {
    const target = document.getElementById(source.dataset.for);
    if (source.dataset.drawn || !target) continue;
    source.dataset.drawn = "1";
    const figure = JSON.parse(source.textContent);
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
    before.replaceWith(after);
    drawWhenSeen();
    return;
  }
  for (const part of before.querySelectorAll(".facts, .alarms, table")) {
    const place = [...before.querySelectorAll(".facts, .alarms, table")].indexOf(part);
    const other = after.querySelectorAll(".facts, .alarms, table")[place];
    if (other && part.innerHTML !== other.innerHTML) part.innerHTML = other.innerHTML;
  }
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

function shapeOf(content) {
  const parts = [...content.querySelectorAll("figure, .facts, .alarms, table")];
  return parts.map((each) => each.tagName + each.className + (each.querySelector(".drawing")?.id ?? "")).join();
}

function isBusy() {
  const focus = document.activeElement;
  return document.hidden || (focus && /^(INPUT|SELECT|TEXTAREA)$/.test(focus.tagName) && focus.id !== "live");
}

async function follow() {
  const box = document.getElementById("live");
  if (box?.checked && !isBusy()) {
    try {
      const answer = await fetch(location.href);
      if (answer.ok) exchange(new DOMParser().parseFromString(await answer.text(), "text/html"));
    } catch {
      box.parentElement.classList.add("lost"); // the page's program has ended
    }
  }
  if (box) setTimeout(follow, FOLLOW_MS);
}

drawWhenSeen();
setTimeout(follow, FOLLOW_MS);
