// Follows a study of the simulator, and shows its result when it ends.
"use strict";

const STUDY_MS = 1000;

async function followStudy() {
  const study = document.getElementById("study");
  let state = null;
  try {
    const answer = await fetch(location.pathname + "/data/state");
    if (answer.ok) state = await answer.json();
  } catch {
    // the page's program has ended, and the study with it
  }
  if (state === null) {
    study.textContent = "The page's program does not answer any more.";
  } else if (state.is_running) {
    study.textContent = state.text;
    setTimeout(followStudy, STUDY_MS);
  } else {
    location.replace(location.href);
  }
}

if (document.getElementById("study")?.dataset.running !== undefined) setTimeout(followStudy, STUDY_MS);
