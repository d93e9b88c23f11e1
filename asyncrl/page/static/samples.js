// Loads a tab again while its index or its search is incomplete.  A live run is followed by page.js instead.
"use strict";

const PROGRESS_MS = 2000;

async function showProgress() {
  if (!document.querySelector("[data-progress]")) return;
  if (!document.getElementById("live") && !isBusy()) {
    try {
      const answer = await fetch(location.href);
      if (answer.ok) exchange(new DOMParser().parseFromString(await answer.text(), "text/html"));
    } catch {
      return; // the page's program has ended
    }
  }
  setTimeout(showProgress, PROGRESS_MS);
}

setTimeout(showProgress, PROGRESS_MS);
