// What went wrong on this page, for its reader and for the tests; runs before everything else.
"use strict";
const troubles = [];
function showTroubles() {
  const notice = document.getElementById("trouble");
  if (notice === null || troubles.length === 0) return;
  notice.hidden = false;
  notice.textContent = "Some of this page could not be drawn: " + troubles.join("; ");
}
function trouble(words) {
  troubles.push(String(words));
  document.documentElement.dataset.status = "trouble";
  document.documentElement.dataset.troubles = JSON.stringify(troubles);
  showTroubles();
}
document.addEventListener("DOMContentLoaded", showTroubles);
window.addEventListener("error", (event) => trouble(event.message || "a part did not load"), true);
window.addEventListener("unhandledrejection", (event) => trouble(event.reason));
document.addEventListener("securitypolicyviolation", (event) =>
  trouble(`blocked ${event.effectiveDirective} ${event.blockedURI}`));
const consoleError = console.error;
console.error = (...words) => { trouble(words.join(" ")); consoleError(...words); };
