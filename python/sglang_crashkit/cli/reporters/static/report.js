"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  // What others wrote becomes text, and nothing but text.
  const make = (parent, tag, text = "", name = "") => {
    const made = document.createElement(tag);
    made.textContent = text;
    made.className = name;
    return parent.appendChild(made);
  };

  // -- the icicle

  const ROW = 20, THINNEST = 0.0012, MAX_BOXES = 4000;
  const icicle = { tree: 0, path: [], folds: true, query: "" };

  // A run of calls that nothing branches from is told by its first and its last two, or five where it ends.
  const nodeOf = ([name, place, set, value, children], folds) => {
    const node = { name, place, set, value };
    const chain = [];
    let end = children;
    while (folds && end.length === 1 && end[0][3] === value && end[0][2] === set) {
      chain.push(end[0]);
      end = end[0][4];
    }
    const kept = end.length ? 2 : 5;
    if (chain.length < kept + 3) {
      node.children = children.map((child) => nodeOf(child, folds));
      return node;
    }
    const hidden = chain.slice(0, -kept).map((one) => one[0]);
    const folded = { name: `${hidden.length} calls: ${hidden.join(" > ")}`, place: "", set, value, folded: true };
    const last = chain.slice(-kept).map(([name, place]) => ({ name, place, set, value }));
    [node, folded, ...last].reduce((above, below) => { above.children = [below]; return below; });
    last.at(-1).children = end.map((child) => nodeOf(child, folds));
    return node;
  };

  const tell = (node) => {
    const set = data.stacks.sets[node.set];
    const many = node.value === 1 ? "1 stack" : `${node.value} stacks`;
    $("icicle-told").textContent = `${node.name || "all stacks"}  ${node.place}\n${many} of ${set.words}`;
  };

  // Everyone is grey, the first failure alone is red, and those of the fewest ranks have the other colours first.
  const colourOf = (set) => {
    const at = data.stacks.trees[icicle.tree].sets.indexOf(set);
    return at === 0 ? "c0" : data.stacks.sets[set].first ? "c1" : `c${2 + (at < 0 ? set : at - 1) % 7}`;
  };

  const drawIcicle = () => {
    const place = $("icicle");
    if (!place) return;
    const focus = icicle.path.at(-1);
    const root = d3.partition()(d3.hierarchy(focus).each((one) => { one.value = one.data.value; }));
    const boxes = icicle.path.slice(0, -1).map((node, depth) => ({ node, depth, x0: 0, x1: 1, above: true }));
    const shift = boxes.length;
    root.each((one) => {
      if (one.x1 - one.x0 >= THINNEST) boxes.push({ node: one.data, depth: one.depth + shift, x0: one.x0, x1: one.x1 });
    });
    place.replaceChildren();
    for (const { node, depth, x0, x1, above } of boxes.slice(0, MAX_BOXES)) {
      const box = make(place, "div", node.name || "all stacks", colourOf(node.set));
      box.classList.toggle("folded", Boolean(node.folded));
      box.classList.toggle("found", Boolean(icicle.query) && `${node.name} ${node.place}`.toLowerCase().includes(icicle.query));
      box.title = `${node.name} ${node.place}`.slice(0, 2000);
      box.style.left = `${x0 * 100}%`;
      box.style.width = `${(x1 - x0) * 100}%`;
      box.style.top = `${depth * ROW}px`;
      box.onmouseenter = () => tell(node);
      box.onclick = () => {
        if (node.folded) return plant(icicle.tree, false);
        icicle.path = above ? icicle.path.slice(0, depth + 1) : [...icicle.path, ...pathTo(focus, node)];
        tell(node);
        return drawIcicle();
      };
    }
    place.style.height = `${(1 + Math.max(...boxes.map((box) => box.depth))) * ROW}px`;
  };

  const pathTo = (from, node) => {
    for (const child of from === node ? [] : from.children) {
      if (child === node) return [child];
      const below = pathTo(child, node);
      if (below.length) return [child, ...below];
    }
    return [];
  };

  const plant = (tree, folds) => {
    Object.assign(icicle, { tree, folds, path: [nodeOf(data.stacks.trees[tree].root, folds)] });
    const buttons = all("button", $("icicle-bar"));
    buttons.forEach((button, at) => button.setAttribute("aria-pressed", String(at === tree || (at === buttons.length - 1 && !folds))));
    $("icicle-sets").replaceChildren();
    for (const number of data.stacks.trees[tree].sets) {
      const entry = make($("icicle-sets"), "span"), set = data.stacks.sets[number];
      make(entry, "i", "", colourOf(number));
      entry.append(set.words);
      make(entry, "small", ` ${set.size}`);
    }
    drawIcicle();
  };

  if ($("icicle")) {
    data.stacks.trees.forEach((tree, at) => { make($("icicle-bar"), "button", tree.name).onclick = () => plant(at, icicle.folds); });
    make($("icicle-bar"), "button", "every call").onclick = () => plant(icicle.tree, !icicle.folds);
    plant(0, true);
    $("icicle-told").textContent = "Click a call to see it alone.";
  }

  // -- the timeline

  const lanes = $("lanes");
  const range = { from: 0, to: 1000 };

  const drawTimeline = () => {
    const begin = Number(lanes.dataset.begin), seconds = Number(lanes.dataset.seconds);
    const at = (place) => ((place - range.from) / (range.to - range.from)) * 100;
    for (const circle of all("circle", lanes)) {
      const place = at(Number(circle.dataset.place));
      circle.setAttribute("cx", `${place}%`);
      circle.classList.toggle("outside", place < 0 || place > 100);
    }
    const axis = $("axis"), shown = (seconds * (range.to - range.from)) / 1000;
    axis.replaceChildren();
    if (!shown) return;
    const about = shown / Math.max(2, axis.clientWidth / 90), power = 10 ** Math.floor(Math.log10(about));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= about);
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    for (let tick = Math.ceil((begin + (seconds * range.from) / 1000) / step) * step; ; tick += step) {
      const place = at(((tick - begin) / seconds) * 1000);
      if (!(place <= 97)) break;
      const text = document.createElementNS("http://www.w3.org/2000/svg", "text");
      text.setAttribute("x", `${place}%`);
      text.setAttribute("y", "14");
      text.textContent = `${tick > step / 2 ? "+" : ""}${tick.toFixed(digits)}`.replace(/^-(0\.?0*)$/, "$1");
      axis.append(text);
    }
  };

  if (lanes) {
    let from = null;
    const placeOf = (event) => {
      const box = $("axis").getBoundingClientRect();
      return range.from + (range.to - range.from) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    };
    lanes.onpointerdown = (event) => { from = placeOf(event); };
    lanes.onpointerup = (event) => {
      const to = placeOf(event), [low, high] = from < to ? [from, to] : [to, from];
      if (from !== null && high - low > (range.to - range.from) / 100) Object.assign(range, { from: low, to: high });
      from = null;
      drawTimeline();
    };
    lanes.ondblclick = () => { Object.assign(range, { from: 0, to: 1000 }); drawTimeline(); };
    window.addEventListener("resize", drawTimeline);
    drawTimeline();
  }

  // -- searching

  const MAX_MARKS = 500, MAX_OPENED = 60;
  const items = all(".item");
  const texts = new WeakMap();
  const textOf = (item) => {
    if (!texts.has(item)) texts.set(item, item.textContent.toLowerCase());
    return texts.get(item);
  };
  let opened = [], found = [], next = 0;

  const mark = (query) => {
    if (!window.CSS?.highlights) return;
    CSS.highlights.delete("found");
    const ranges = [];
    for (const item of query ? found : []) {
      const walker = document.createTreeWalker(item, NodeFilter.SHOW_TEXT);
      while (walker.nextNode() && ranges.length < MAX_MARKS) {
        const text = walker.currentNode.data.toLowerCase();
        for (let at = text.indexOf(query); at >= 0 && ranges.length < MAX_MARKS; at = text.indexOf(query, at + query.length)) {
          const one = new Range();
          // Lower case may be longer.
          one.setStart(walker.currentNode, Math.min(at, walker.currentNode.length));
          one.setEnd(walker.currentNode, Math.min(at + query.length, walker.currentNode.length));
          ranges.push(one);
        }
      }
    }
    if (ranges.length) CSS.highlights.set("found", new Highlight(...ranges));
  };

  const search = () => {
    const query = $("search").value.trim().toLowerCase();
    opened.forEach((details) => { details.open = false; });
    opened = [];
    found = query ? items.filter((item) => textOf(item).includes(query)) : [];
    const kept = new Set(found);
    // The first screen stays as it is.
    items.forEach((item) => { item.hidden = Boolean(query) && !kept.has(item) && !item.closest("#what"); });
    next = 0;
    for (const item of found) {
      for (let one = item; one && opened.length < MAX_OPENED; one = one.parentElement.closest("details")) {
        if (one.tagName === "DETAILS" && !one.open) { one.open = true; opened.push(one); }
      }
    }
    all("main > section").forEach((section) => { section.hidden = Boolean(query) && !found.some((item) => section.contains(item)) && !["what", "stacks"].includes(section.id); });
    $("hits").textContent = query ? `${found.length}` : "";
    icicle.query = query;
    drawIcicle();
    mark(query);
  };

  let timer = 0;
  $("search").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(search, 60); });

  const show = (element) => {
    all(".here").forEach((one) => one.classList.remove("here"));
    element.classList.add("here");
    element.scrollIntoView({ block: "nearest" });
  };

  // -- copying

  const line = (element) => element.textContent.replace(/\s+/g, " ").trim();
  const fence = (text) => "`".repeat(Math.max(3, ...(text.match(/`+/g) || []).map((run) => run.length + 1)));
  const cells = (row) => `| ${[...row.cells].map((cell) => line(cell).replaceAll("|", "\\|")).join(" | ")} |\n`;
  const markdown = (element) => {
    if (element.hidden || element.matches("button, svg, .icicle, .tiles, .legend, .bar, .told, .lanes")) return "";
    const inner = () => [...element.children].map(markdown).join("");
    switch (element.tagName) {
      case "H1": case "H2": case "H3": {
        const bare = element.cloneNode(true);
        all("button", bare).forEach((button) => button.remove());
        return `${"#".repeat(Number(element.tagName[1]))} ${line(bare)}\n\n`;
      }
      case "P": return `${line(element)}\n\n`;
      case "LI": return `- ${line(element)}\n`;
      case "UL": case "OL": return `${inner()}\n`;
      case "SUMMARY": return `**${line(element)}**\n\n`;
      case "DETAILS": return element.open ? inner() : "";
      case "DT": return `- ${line(element)}: ${line(element.nextElementSibling)}\n`;
      case "DD": return "";
      case "PRE": return `${fence(element.textContent)}\n${element.textContent.trimEnd()}\n${fence(element.textContent)}\n\n`;
      case "TABLE": {
        const rows = [...element.rows].filter((row) => !row.hidden);
        const head = element.tHead ? "" : `|${"  |".repeat(rows[0]?.cells.length || 1)}\n`;
        const rule = `|${" --- |".repeat(rows[0]?.cells.length || 1)}\n`;
        return `${head}${rows.map((row, at) => cells(row) + (element.tHead && at === 0 ? rule : "")).join("").replace(/^/, head ? rule : "")}\n`;
      }
      default: return inner();
    }
  };

  const toast = (text) => {
    $("toast").textContent = text;
    $("toast").classList.add("shown");
    setTimeout(() => $("toast").classList.remove("shown"), 1500);
  };

  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Without the right to the clipboard there is the old way.
      const area = make(document.body, "textarea");
      area.value = text;
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    toast("copied as Markdown");
  };
  const copyAll = () => copy(data.markdown);
  $("copy").onclick = copyAll;
  all("button[data-copy]").forEach((button) => { button.onclick = () => copy(markdown($(button.dataset.copy))); });

  // -- keys

  const expand = () => {
    const scope = document.activeElement?.closest?.("main > section") || document;
    const parts = all("details", scope).filter((one) => !one.hidden);
    const open = parts.some((one) => !one.open);
    parts.forEach((one) => { one.open = open; });
    opened = [];
  };
  $("expand").onclick = () => { document.activeElement?.blur(); expand(); };
  $("help").onclick = () => $("keys").showModal();

  const step = (by) => {
    const stops = all(".stop").filter((one) => one.checkVisibility());
    const at = stops.indexOf(document.activeElement);
    const stop = stops[at < 0 ? (by > 0 ? 0 : stops.length - 1) : Math.min(stops.length - 1, Math.max(0, at + by))];
    stop?.focus({ preventScroll: true });
    if (stop) show(stop);
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
    const searching = event.target === $("search");
    if (event.key === "Escape" && ($("search").value || searching)) {
      $("search").value = "";
      $("search").blur();
      search();
    } else if (event.key === "Enter" && searching && found.length) {
      show(found[next++ % found.length]);
    } else if (!searching) {
      const keys = { "/": () => $("search").focus(), j: () => step(1), k: () => step(-1), e: expand, c: copyAll, "?": () => $("keys").showModal() };
      if (!Object.hasOwn(keys, event.key)) return;
      keys[event.key]();
    } else {
      return;
    }
    event.preventDefault();
  });
  document.documentElement.dataset.ready = "yes";
})();
