"use strict";
// Refreshes the live parts of a page. Everything else works without this script.
(() => {
  const main = document.querySelector("main[data-refresh]");
  const auto = document.getElementById("auto");
  if (!main || !auto) return;
  auto.closest("label").hidden = false;

  const isInUse = (part) =>
    part.contains(document.activeElement) || part.querySelector("details[open]") !== null;

  const refresh = async () => {
    if (!auto.checked || document.hidden) return;
    let answer;
    try {
      answer = await fetch(location.href, { headers: { accept: "text/html" }, redirect: "error" });
    } catch {
      return;
    }
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of document.querySelectorAll("[data-live]")) {
      const found = fresh.getElementById(part.id);
      if (found && !isInUse(part) && found.innerHTML !== part.innerHTML) {
        part.replaceChildren(...found.childNodes);
      }
    }
    const form = document.getElementById("pause-form");
    const other = fresh.getElementById("pause-form");
    if (form && other && !form.contains(document.activeElement) && form.action !== other.action) {
      form.replaceWith(other);
    }
  };
  setInterval(refresh, Number(main.dataset.refresh) * 1000);
})();
