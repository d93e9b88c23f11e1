// Loads a tab again while its index or its search is incomplete.  A live run is followed by page.js instead.
"use strict";

const PROGRESS_MS = 2000;

async function showProgress() {
  if (!document.querySelector("[data-progress]")) return;
  if (!document.getElementById("live") && !isBusy()) {
    try {
      await refreshed();
    } catch {
      return; // the page's program has ended
    }
  }
  setTimeout(showProgress, PROGRESS_MS);
}

setTimeout(showProgress, PROGRESS_MS);
