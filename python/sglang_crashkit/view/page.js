"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const items = all(".item");
  const texts = new Map(items.map((item) => [item, null]));
  const textOf = (item) => texts.get(item) ?? texts.set(item, item.textContent.toLowerCase()).get(item);
  let opened = [], timer = 0;

  const search = () => {
    const query = $("search").value.trim().toLowerCase();
    const found = items.filter((item) => query && textOf(item).includes(query));
    const kept = new Set(found);
    opened.forEach((details) => { details.open = false; });
    opened = [];
    // The first screen stays as it is.
    items.forEach((item) => { item.hidden = Boolean(query) && !kept.has(item) && !item.closest("#what"); });
    for (const item of found.slice(0, 60)) {
      for (let one = item.closest("details"); one; one = one.parentElement.closest("details")) {
        if (!one.open) { one.open = true; opened.push(one); }
      }
    }
    all("main > section:not(#what)").forEach((section) => {
      section.hidden = Boolean(query) && !found.some((item) => section.contains(item));
    });
    $("hits").textContent = query ? `${found.length}` : "";
  };

  const copy = async () => {
    const text = JSON.parse($("markdown").textContent);
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Without the right to the clipboard there is the old way.
      const area = document.body.appendChild(document.createElement("textarea"));
      area.value = text;
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    $("copy").textContent = "copied";
  };

  const expand = () => {
    const parts = all("details"), open = parts.some((one) => !one.open);
    parts.forEach((one) => { one.open = open; });
  };

  $("search").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(search, 60); });
  $("copy").onclick = copy;
  $("expand").onclick = expand;
  document.addEventListener("keydown", (event) => {
    const keys = { "/": () => $("search").focus(), e: expand, c: copy };
    if (event.ctrlKey || event.metaKey || event.altKey || event.target === $("search")) return;
    if (!Object.hasOwn(keys, event.key)) return;
    keys[event.key]();
    event.preventDefault();
  });
  document.documentElement.dataset.ready = "yes";
})();
