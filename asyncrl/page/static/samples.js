// Fetches a tab again while its index or its search is incomplete, and exchanges what changed.
"use strict";

const PROGRESS_MS = 1000;

async function showProgress() {
  if (!document.querySelector("[data-progress]")) return;
  if (!isBusy()) {
    try {
      await refreshed();
    } catch {
      return; // the page's program has ended
    }
  }
  setTimeout(showProgress, PROGRESS_MS);
}

setTimeout(showProgress, PROGRESS_MS);
